"""What does this package raise when the caller can put something right?"""


class UserError(ValueError):
    """A mistake that the caller can mend. The message says what was expected, what was found and what to do."""
