"""The one exception for a mistake of the user."""


class UserError(ValueError):
    """A mistake of the user, in one line: what was expected, what came, what is allowed.

    The command line prints the line alone and leaves with code 2; anything else that is raised is a mistake of ours.
    """
