"""What all tests have alike."""

import signal


def pytest_configure():
    """Signals are what they are in a terminal: under nohup, or behind a `&`, all that is started would ignore some."""
    for each, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(each) is signal.SIG_IGN:
            signal.signal(each, usual)
