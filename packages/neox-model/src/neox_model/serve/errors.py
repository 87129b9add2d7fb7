"""Errors of the API, in the form of OpenAI's."""

import json
from itertools import islice
from typing import Any

__all__ = ["ApiError", "shown"]

# Type of each error by status.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# Also of a number that is not finite, which a message may show.
_ENCODER = json.JSONEncoder(ensure_ascii=False)
_LONGEST_VALUE = 60


class ApiError(Exception):
    """Raised to answer a request with an error.

    Args:
        status: status of HTTP.
        message: what is wrong, and what to do.
        param: parameter of the request that is wrong.
        code: short name of the error, for programs.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shown(value: Any) -> str:
    """Return the beginning of a value of a request for a message, as JSON."""
    # A value can have megabytes; each part is at least one character.
    text = "".join(islice(_ENCODER.iterencode(value), _LONGEST_VALUE + 1))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
