"""The one error that means "you asked for something that cannot be had"."""


class RequestError(ValueError):
    """A request that cannot be carried out: the message names the value, what is allowed and the way out.

    The command line prints it as one line and exits with status 2; from Python it is a `ValueError`.
    """
