"""train: from a recipe and a strategy to a finished run folder."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from trainfit.errors import ResumeError
from trainfit.hardware import Accelerator, Launch
from trainfit.hardware.together import together
from trainfit.step import Strategy, build_step
from trainfit.train.checkpoint import RunState, read_state
from trainfit.train.data import TextData, prepare_data
from trainfit.train.events import Archived, Event, Preparing, Resumed, Started, TrainReport
from trainfit.train.measured import MeasuredUpdate
from trainfit.train.metrics import MetricsWriter, NoMetrics
from trainfit.train.packing import epoch_order, unigram_loss
from trainfit.train.reading import changed_keys
from trainfit.train.recipe import Recipe
from trainfit.train.run import OnEvent, Run
from trainfit.train.run_folder import SUMMARY_FILE, RunFolder
from trainfit.train.tightening import UseMeter
from trainfit.workload import Workload
from trainfit.workload.huggingface import is_transformers_model

# A run that goes on under other values of these would be another run: its weights or its position mean nothing there.
_KEPT_ON_RESUME = ("model", "adapter", "freeze", "train_only", "data", "seq_len", "seed")
_DATA_BEFORE = {"lengths": "packed"}  # what checkpoints mean that are older than the key


def train(
    recipe: Recipe,
    strategy: Strategy,
    workload: Workload,
    accelerator: Accelerator,
    *,
    plan: Mapping[str, Any] | None = None,
    on_event: OnEvent = lambda event: None,
    resume: bool = False,
    measure: bool = True,
    launch: Launch | None = None,
) -> TrainReport:
    """Train as the recipe says, each update run as the strategy says, and leave a run folder.

    plan: what plan.json will hold; its "hash" goes into checkpoints. measure: record the second update, so that the
    report has a Profile to set against the prediction. launch: the processes that run this together, all of which call
    it and see the same run folder; rank 0 writes it, and is the only one whose on_event is called. Ctrl-C or SIGTERM on
    any of them ends the run after the update it falls in, saved. Raises RecipeError, DataError or ResumeError before
    the first update, with nothing left half-written, and TrainfitError when the loss is no longer finite.
    """
    began = time.perf_counter()
    plan = plan or {"strategy": strategy.to_json(), "hash": strategy.hash}
    launch = launch or Launch()
    if resume:
        workload = workload.copy(start=None)  # the checkpoint has all weights, and the folder may be gone
    launch.share("weights", lambda: check_weights(workload))
    with ExitStack() as stack:
        setup = _Setup(recipe, workload, launch, on_event if launch.is_first else _nobody, resume)
        try:
            launch.share("folder", lambda: setup.open_folder(stack))
            setup.read(resume)
            stack.enter_context(launch.process_group(accelerator, timeout_seconds=recipe.timeout_seconds))
            measured = stack.enter_context(MeasuredUpdate(accelerator)) if measure and launch.is_first else None
            budget_bytes = int(plan.get("budget_bytes") or recipe.memory or accelerator.memory.total_bytes())
            run = setup.build(strategy, accelerator, str(plan.get("hash", "")), budget_bytes)
            if setup.saved is not None:
                _restore(run, setup.saved)
        except BaseException:  # Ctrl-C included: a run that never began leaves no empty folders
            setup.undo()
            raise
        launch.share("begin", lambda: setup.begin(plan, run.step.model))
        baseline = unigram_loss(setup.data.train, setup.data.held_out, run.held_out_indices, setup.data.vocab_size)
        setup.on_event(_started(run, workload, baseline))
        metrics = _metrics(run, launch)
        stack.enter_context(metrics)
        # The watch ends first: others must hear at once of what was raised here, whatever is being written.
        with _deferred_interrupt() as stop, run.checkpoints, run.watch:
            interrupted = run.go(metrics, stop, measured)
            with run.watch.waiting_allowed("saving"):
                run.checkpoints.wait()
        report = run.report(interrupted=interrupted, unigram_loss=baseline, total_seconds=time.perf_counter() - began)
        if not interrupted and launch.is_first:
            setup.folder.write_json(SUMMARY_FILE, report.to_json())
    return report


def check_weights(workload: Workload) -> str:
    """Raises ModelError where the weights to start from are not the model's, before anything is planned or made."""
    if workload.start is not None:
        workload.start.check(workload.meta_model())
    return ""


def _metrics(run: Run, launch: Launch) -> MetricsWriter | NoMetrics:
    return MetricsWriter(run.folder.path, after_step=run.step_number) if launch.is_first else NoMetrics()


def _nobody(event: Event) -> None: ...


class _Setup:
    """What comes before the first update: on rank 0 all of it, on the others what is there by then."""

    def __init__(self, recipe: Recipe, workload: Workload, launch: Launch, on_event: OnEvent, resume: bool) -> None:
        self.recipe, self.workload, self.launch, self.on_event = recipe, workload, launch, on_event
        self.resume = resume
        self.folder: RunFolder
        self.saved: RunState | None = None
        self.data: TextData

    def open_folder(self, stack: ExitStack) -> str:
        """Rank 0: lock the folder, refuse what must not be overwritten, make the tokens."""
        self.folder = RunFolder(Path(self.recipe.run_folder).expanduser())
        stack.enter_context(self.folder.locked())
        if self.resume:
            _saved_state(self.recipe, self.folder)
        else:
            self.folder.refuse_unfinished()
        self.data = self._prepare_data(self.resume)
        return ""

    def read(self, resume: bool) -> None:
        """Every rank: what rank 0 has made."""
        if not self.launch.is_first:
            self.folder = RunFolder(Path(self.recipe.run_folder).expanduser())
            self.data = self._prepare_data(resume=True)
        if resume:
            self.saved = _saved_state(self.recipe, self.folder)

    def _prepare_data(self, resume: bool) -> TextData:
        return prepare_data(
            self.recipe,
            self.folder.data,
            max_vocab_size=self.workload.vocab_size,
            resume=resume,
            progress=lambda what, done, total: self.on_event(Preparing(what, done, total)),
        )

    def build(self, strategy: Strategy, accelerator: Accelerator, plan_hash: str, budget_bytes: int) -> Run:
        recipe = self.recipe
        train = self.data.train
        orders = (epoch_order(train, recipe.seed, epoch) for epoch in range(recipe.epochs or 0))
        steps = recipe.steps or train.updates(orders, recipe.sequences_per_step)
        torch.manual_seed(recipe.seed)  # before the weights are drawn, alike on all ranks; seeds the devices too
        step = build_step(self.workload, strategy, accelerator, max_grad_norm=recipe.max_grad_norm)
        if step.ranks.data_index:
            torch.manual_seed(recipe.seed + step.ranks.data_index)  # other data, other dropout
        run = Run(recipe, step, self.data, accelerator, self.folder, steps, plan_hash, self.on_event)
        if strategy.tier_table:
            run.watch_use(UseMeter(accelerator), budget_bytes)
        return run

    def begin(self, plan: Mapping[str, Any], model: nn.Module) -> str:
        """Rank 0: move an earlier run aside and write what this one is about to do."""
        if not self.resume and (archive := self.folder.archive()) is not None:
            self.on_event(Archived(archive))
        config: Any = getattr(model, "config", None) if is_transformers_model(model) else None
        self.folder.begin(plan, self.recipe.to_json(), config and json.loads(config.to_json_string()))
        return ""

    def undo(self) -> None:
        if self.launch.is_first and hasattr(self, "folder"):
            self.folder.undo()


def _saved_state(recipe: Recipe, folder: RunFolder) -> RunState:
    state = together(lambda: read_state(folder.latest_checkpoint()))[0]
    saved = {**state.recipe, "data": {**_DATA_BEFORE, **(state.recipe.get("data") or {})}}
    kept = [key for key in _KEPT_ON_RESUME if saved.get(key) != recipe.to_json()[key]]
    if kept:
        old = {key: saved.get(key) for key in kept}
        new = {key: recipe.to_json()[key] for key in kept}
        first = changed_keys(old, new)[0]
        raise ResumeError(
            f"{folder.path} was trained with another {first} ({_at(old, first)!r} then, {_at(new, first)!r} now); "
            "resume with what it had, or start anew in another run_folder="
        )
    return state


def _at(values: Any, dotted: str) -> Any:
    for key in dotted.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _restore(run: Run, saved: RunState) -> None:
    checkpoint = run.folder.latest_checkpoint()
    if saved.step >= run.steps:
        raise ResumeError(f"{checkpoint} is at step {saved.step} of {run.steps}: the run is over; raise steps to go on")
    restored = run.checkpoints.load(checkpoint, run.step.model, run.step.optimizer)
    restored.set_rng(run.accelerator)
    run.step.notes += restored.notes
    run.step_number, run.position, run.tokens = saved.step, saved.position, saved.tokens
    run.skipped_steps = saved.skipped_steps
    _restore_scaling(run, saved, checkpoint)
    run.checkpoint = checkpoint
    changed = tuple(changed_keys(saved.recipe, run.recipe.to_json()))
    run.on_event(Resumed(saved.step, checkpoint, changed, plan_changed=saved.plan_hash != run.plan_hash))


def _restore_scaling(run: Run, saved: RunState, checkpoint: Path) -> None:
    scaling, state = run.step.scaling, saved.loss_scaling
    if scaling is None or state is None:
        return
    if state.get("kind") != scaling.kind:
        run.step.notes += (f"loss scales begin anew: {checkpoint} has {state.get('kind')} ones",)
        return
    try:
        scaling.load(state)
    except (KeyError, TypeError, ValueError) as error:
        raise ResumeError(
            f"{checkpoint} has loss scales that cannot be read ({error}); remove it to go on before it"
        ) from None


def _started(run: Run, workload: Workload, baseline: float) -> Started:
    return Started(
        step=run.step_number,
        steps=run.steps,
        num_parameters=run.step.num_parameters,
        training_tokens=len(run.data.train.tokens),
        held_out_tokens=len(run.data.held_out.tokens),
        held_out_loss_tokens=run.data.held_out.num_tokens_of(run.held_out_indices),
        unigram_loss=baseline,
        notes=(*run.step.notes, *_unused_vocabulary(workload.vocab_size, run.data.vocab_size)),
    )


def _unused_vocabulary(of_model: int, of_tokenizer: int) -> tuple[str, ...]:
    """A word where most of the embedding belongs to tokens that no text can give."""
    if of_model < 2 * of_tokenizer:
        return ()
    return (
        f"the model has {of_model} tokens, the tokenizer {of_tokenizer}: a smaller vocab_size of the model would do",
    )


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C or SIGTERM came; a second Ctrl-C stops at once.

    An update cut in two cannot be saved: some parameters would have moved and others not.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield requested.is_set
        return

    def request(number: int, frame: FrameType | None) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    previous = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
