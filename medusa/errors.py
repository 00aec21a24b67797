"""The errors that are told in one line: a request that is wrong, and a run that cannot go on."""


class RequestError(ValueError):
    """A request that cannot be carried out: the message names the value, what is allowed and the way out.

    The command line prints it as one line and exits with status 2; from Python it is a `ValueError`.
    """


class RunError(RuntimeError):
    """A run that cannot go on for reasons outside of it (a full disk, a server that is gone), with the way out.

    The command line prints it as one line and exits with status 1.
    """
