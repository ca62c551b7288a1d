"""The engine of `ParameterServerStrategy`."""
