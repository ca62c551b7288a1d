"""All models of the zoo. Importing this module fills `CASES`."""

from tests.zoo import architectures, layers, losses, optimizers
from tests.zoo.case import CASES
from tests.zoo.examples import generative, graphs, guides, self_supervised, sequences, structured_data, text, vision

__all__ = ["CASES", "architectures", "generative", "graphs", "guides", "layers", "losses", "optimizers"]
__all__ += ["self_supervised", "sequences", "structured_data", "text", "vision"]
