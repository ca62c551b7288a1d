"""All models of the zoo. Importing this module fills `CASES`."""

from tests.zoo import architectures, layers, losses, optimizers
from tests.zoo.case import CASES

__all__ = ["CASES", "architectures", "layers", "losses", "optimizers"]
