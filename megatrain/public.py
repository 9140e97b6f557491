"""The public names of megatrain; the package has them all, and imports this file when the first one is used."""

from megatrain.device.device_budget import DeviceMemoryError
from megatrain.errors import (
    ApartWarning,
    CheckpointError,
    DeviceMemoryWarning,
    DrawsError,
    EagerKernelsWarning,
    ExecuteError,
    GradScalerWarning,
    HeldMemoryWarning,
    HookOrderWarning,
    LowerError,
    ManyCapturesWarning,
    MegatrainError,
    MicroBatchError,
    NeedlessFileWarning,
    OpaqueModelWarning,
    OptimizerError,
    OptionError,
    PageLockWarning,
    RanksError,
    ReadsParameterError,
    ResumeWarning,
    ScheduleError,
    StreamedCallsWarning,
    TooSmallError,
    TorchError,
    TraceError,
    TrainStepWarning,
    UntestedTorchWarning,
    UnwatchedWarning,
    WeightsError,
)
from megatrain.hardware.hardware import Hardware
from megatrain.optim.fast.adamw_8bit import AdamW8bit
from megatrain.optim.grad_scaler import GradScaler
from megatrain.passes.pipeline import lower
from megatrain.passes.program import Block, Program, Template
from megatrain.passes.rewriter import Rewriter
from megatrain.planning.host_plan import HostPlan
from megatrain.planning.plan import Plan
from megatrain.planning.planned_step import SavedPlan
from megatrain.planning.planner import plan
from megatrain.runtime.engine import Engine
from megatrain.runtime.executor import Executor
from megatrain.runtime.streams.stream_set import Chaos, Recording
from megatrain.scheduler.from_program import schedule, workload
from megatrain.scheduler.schedule import Schedule
from megatrain.scheduler.step_kind import StepKind
from megatrain.scheduler.workload import Workload
from megatrain.tools.reporting.step_report import report
from megatrain.tools.verification import Report, verify
from megatrain.tracer.spec import TensorSpec
from megatrain.tracer.trace import trace
from megatrain.tracer.traced import TracedModule
from megatrain.training.compiled.compiling import compile  # the name torch users expect
from megatrain.training.compiled.module import CompiledModule
from megatrain.training.step import TrainStep

__all__ = [
    "AdamW8bit",
    "ApartWarning",
    "Block",
    "Chaos",
    "CheckpointError",
    "CompiledModule",
    "DeviceMemoryError",
    "DeviceMemoryWarning",
    "DrawsError",
    "EagerKernelsWarning",
    "Engine",
    "ExecuteError",
    "Executor",
    "GradScaler",
    "GradScalerWarning",
    "Hardware",
    "HeldMemoryWarning",
    "HookOrderWarning",
    "HostPlan",
    "LowerError",
    "ManyCapturesWarning",
    "MegatrainError",
    "MicroBatchError",
    "NeedlessFileWarning",
    "OpaqueModelWarning",
    "OptimizerError",
    "OptionError",
    "PageLockWarning",
    "Plan",
    "Program",
    "RanksError",
    "ReadsParameterError",
    "Recording",
    "Report",
    "ResumeWarning",
    "Rewriter",
    "SavedPlan",
    "Schedule",
    "ScheduleError",
    "StepKind",
    "StreamedCallsWarning",
    "Template",
    "TensorSpec",
    "TooSmallError",
    "TorchError",
    "TraceError",
    "TracedModule",
    "TrainStep",
    "TrainStepWarning",
    "UntestedTorchWarning",
    "UnwatchedWarning",
    "WeightsError",
    "Workload",
    "compile",
    "lower",
    "plan",
    "report",
    "schedule",
    "trace",
    "verify",
    "workload",
]
