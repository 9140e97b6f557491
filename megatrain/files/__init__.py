from megatrain.files.disk import Source
from megatrain.files.generators import check_generators, generators_now, restore_generators
from megatrain.files.load import Checkpoint, Saved, load
from megatrain.files.optimizers import OptimizerState
from megatrain.files.save import save

__all__ = [
    "Checkpoint",
    "OptimizerState",
    "Saved",
    "Source",
    "check_generators",
    "generators_now",
    "load",
    "restore_generators",
    "save",
]
