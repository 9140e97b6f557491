from megatrain.files.disk import Source
from megatrain.saving.generators import check_generators, generators_now, restore_generators
from megatrain.saving.load import Checkpoint, Saved, load
from megatrain.saving.optimizers import OptimizerState
from megatrain.saving.save import save

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
