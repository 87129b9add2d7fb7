"""Problems of a loaded configuration, with the locations of its values."""

from neox_config.errors import ConfigError
from neox_config.problems import Problem, config_error, in_words, place_of
from neox_config.schema.config import NeoXConfig

__all__ = ["placed", "refusal"]


def placed(config: NeoXConfig, problem: Problem) -> Problem:
    """Return a problem with the location and the value of its parameter, unless it already has them."""
    return problem.located(place_of(config.sources, problem.name), in_words(config.value_of(problem.name)))


def refusal(config: NeoXConfig, *problems: Problem) -> ConfigError:
    """Return an error with all problems, each with its location and value."""
    return config_error([placed(config, problem) for problem in problems], config.files)
