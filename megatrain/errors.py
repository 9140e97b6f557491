"""The errors a user can meet; each says what is wrong, the rule, and the way out."""

from __future__ import annotations

from collections.abc import Sequence


class MegatrainError(Exception):
    """Base of every error that megatrain raises for its users.

    The first line of the message stands alone. A window of context (a few rows of a schedule, the user's
    source line) is attached with `add_note`.
    """


class TorchError(MegatrainError):
    """This version of torch lacks a private part on which numbers depend, or the part behaves differently."""


class OptionError(MegatrainError, ValueError):
    """An option is unknown or unreadable: a misspelt name, a size such as `"10 quux"`."""


class TraceError(MegatrainError):
    """The model can't be captured faithfully; the message names the user's source line."""


class UntestedTorchWarning(UserWarning):
    """This version of torch is newer than those that megatrain is tested with."""


class OpaqueModelWarning(UserWarning):
    """The outermost module runs its own code at each step, as one block."""


class ManyCapturesWarning(UserWarning):
    """Most of the latest calls were captured anew, because shapes or values change from call to call."""


class UnwatchedWarning(UserWarning):
    """A forward may read something that nobody can compare from call to call: an iterator."""


class HookOrderWarning(UserWarning):
    """Hooks on parameters may run in another order than in eager: some of them, or next to hooks of modules."""


class EagerKernelsWarning(UserWarning):
    """A template runs on eager's kernels one by one, although `kernels="inductor"` or `"graphs"` was asked for."""


class PageLockWarning(UserWarning):
    """Weights aren't in page-locked memory, so transfers are slower: the system refuses it, or they stay in files."""


class HeldMemoryWarning(UserWarning):
    """Somebody else holds the memory of weights, so that copies are slower, or the two are parted."""


class DeviceMemoryWarning(UserWarning):
    """The device has less free memory than the budget, ran out in a step that was then repeated, or runs other kernels.

    Other kernels than those that were planned may take more memory.
    """


class LowerError(MegatrainError):
    """A captured model can't be cut into blocks, or a pass broke the program."""


class WeightsError(MegatrainError):
    """Files of weights can't be read, or don't fit the model."""


class CheckpointError(MegatrainError):
    """A checkpoint of training can't be written, is damaged, or doesn't fit the objects that it is read into."""


class ResumeWarning(UserWarning):
    """A training goes on where its random numbers can't: on another kind of device than it was saved from."""


class ApartWarning(UserWarning):
    """Other processes of `torch.distributed` get nothing of the gradients of a call."""


class StreamedCallsWarning(UserWarning):
    """A trainer runs its updates as streamed calls and an update on the host, not as one training step."""


class NeedlessFileWarning(UserWarning):
    """Optimizer state is to be in a file between updates, and the host has room for all of it."""


class TrainStepWarning(UserWarning):
    """A loop around a training step does once more what the step has done, or its model trains without its dropout."""


class GradScalerWarning(UserWarning):
    """A model runs under fp16 autocast on an accelerator, and no `megatrain.GradScaler` was made for its losses."""


class ScheduleError(MegatrainError):
    """A schedule doesn't fit into the given memory, can't be read, or isn't safe."""


class TooSmallError(ScheduleError):
    """A budget of the device's memory is smaller than what a schedule needs at least.

    Args:
        text: Of the error, without what helps.
        least_bytes: What is needed at least.
        helps: What helps, two or more.
    """

    def __init__(self, text: str, least_bytes: int, helps: Sequence[str]) -> None:
        super().__init__(f"{text}\n  What helps: {', '.join(helps[:-1])} or {helps[-1]}.")
        self.text = text
        self.least_bytes = least_bytes
        self.helps = (*helps,)
        self.helps = tuple(helps)


class MicroBatchError(ScheduleError):
    """Micro-batches of one training step run other layers, or the same ones in another order."""


class ExecuteError(MegatrainError):
    """A compiled model was used wrongly, or an operation failed while it ran."""


class OptimizerError(MegatrainError, ValueError):
    """An optimizer can't update the model block by block, or a step was taken out of order."""


class ReadsParameterError(ExecuteError):
    """The loss of a training step gives a parameter a gradient that doesn't come through the model's results."""


class RanksError(MegatrainError):
    """Another process of a training step failed or ended, or the processes differ where they must not."""


class DrawsError(ExecuteError):
    """A model drew an unexpected number of random values in a step of several micro-batches."""
