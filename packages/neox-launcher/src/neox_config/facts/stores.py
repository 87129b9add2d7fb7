"""URLs of folders in object stores, and the packages that reach each kind of store."""

import re
from collections.abc import Mapping

__all__ = ["BUCKET_PACKAGES", "MULTIPART_BYTES", "has_credentials", "is_url", "packages_for", "scheme_of"]

BUCKET_PACKAGES: Mapping[str, str] = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""Scheme of a URL to the package that fsspec requires for it. These stores have buckets and no folders."""

MULTIPART_BYTES = 5 * 2**20
"""Smallest part of an S3 upload except the last one."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PASSWORD = re.compile(r"//[^/@\s]*@")


def is_url(text: str) -> bool:
    """Return whether a text names a folder by a URL, and not by a path."""
    return _URL.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the part of a URL before `://`."""
    found = _URL.match(url)
    return "" if found is None else found[1].lower()


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a user name, and possibly a password.

    In Azure's, the name before `@` is that of the container.
    """
    return BUCKET_PACKAGES.get(scheme_of(url)) != "adlfs" and _PASSWORD.search(url) is not None


def packages_for(url: str) -> tuple[str, ...]:
    """Return the packages that must be installed to reach a store."""
    found = BUCKET_PACKAGES.get(scheme_of(url))
    return ("fsspec",) if found is None else ("fsspec", found)
