"""The version of what a class of ours pickles."""


def check_pickle_version(cls: str, version: int, newest: int) -> None:
    """Raise ValueError for a pickle that a newer grouped_linear wrote.

    >>> check_pickle_version("GroupedTensor", 2, newest=1)
    Traceback (most recent call last):
    ValueError: GroupedTensor: the pickle has version 2, this grouped_linear reads versions up to 1
    """
    if version > newest:
        raise ValueError(
            f"{cls}: the pickle has version {version}, this grouped_linear reads versions up to "
            f"{newest}"
        )
