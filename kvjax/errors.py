"""Errors that a user can cause, each with the exit code that the command line gives it."""


class KvjaxError(Exception):
    """Base of every error that is the caller's to mend. The message names value, limit and fix."""

    exit_code = 1


class UsageError(KvjaxError):
    """A flag, a configuration value or an input that cannot be used."""

    exit_code = 2


class ModelError(KvjaxError):
    """A model or tokenizer that cannot be loaded."""

    exit_code = 3


class CapacityError(KvjaxError):
    """A request that does not fit the model's context or the memory."""

    exit_code = 4


class NumericalError(KvjaxError):
    """NaN or infinity where a finite number is needed."""

    exit_code = 5


class Interrupted(KvjaxError):
    """What the caller asked to stop, where a part of it would be of no use."""

    exit_code = 130
