"""The cases that are tested in this run, for a fixture that trains all of them at once."""


def selected(request, *arguments):
    """The values that the collected tests of a module have for some arguments, without repetition.

    `-k`, and the mark `rotates`, then decide what a module-scoped fixture trains.

    Args:
        request: that of a fixture of the module.
        arguments: names of arguments of parametrized tests.
    """
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    params = [item.callspec.params for item in items]
    return list(dict.fromkeys(each[name] for each in params for name in arguments if name in each))
