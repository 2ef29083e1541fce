"""Text that is none: half of a surrogate pair, which JSON and Python's strings can hold and UTF-8 cannot."""


def lone_surrogate(text: str) -> tuple[int, str] | None:
    """Where the first one is, and its name, such as U+D800; None where all of `text` is Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start, f"U+{ord(text[error.start]):04X}"
    return None
