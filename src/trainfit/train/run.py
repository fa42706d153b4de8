"""Run: the state of a training run between its updates, and what happens at each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path

from trainfit.errors import TrainfitError
from trainfit.hardware import Accelerator
from trainfit.hardware.together import together
from trainfit.profile import Profile
from trainfit.step import StepResult, TrainStep, count_underflow, find_overflow
from trainfit.train.checkpoint import RunState
from trainfit.train.data import TextData
from trainfit.train.evaluate import held_out_loss
from trainfit.train.events import Evaluated, Event, Interrupted, Measured, Saved, StepDone, TiersChanged, TrainReport
from trainfit.train.measured import MEASURED_UPDATE, MeasuredUpdate
from trainfit.train.metrics import MetricsWriter, NoMetrics
from trainfit.train.packing import Indices, Position, windows
from trainfit.train.prefetch import Prefetch
from trainfit.train.recipe import PerBatchSettings, Recipe
from trainfit.train.run_folder import RunFolder
from trainfit.train.saving import Checkpoints
from trainfit.train.schedule import learning_rate_at
from trainfit.train.tightening import Tightening, UseMeter
from trainfit.train.watch import StallWatch
from trainfit.workload.batch import MicroBatch

OnEvent = Callable[[Event], None]


class Run:
    """One run in progress. step_number, position and tokens say how far it is; checkpoints hold the same three.

    NOTE [ Steps and updates ]
    A step consumes a window of data, and the run ends after as many as the recipe says. In fp16 some overflow and are
    skipped: weights, moments and the optimizer's counters stay, so the learning rate must not move on either. The
    schedule counts updates, step_number - skipped_steps, and a run that skipped ends so much short of its last rate.
    """

    def __init__(
        self,
        recipe: Recipe,
        step: TrainStep,
        data: TextData,
        accelerator: Accelerator,
        folder: RunFolder,
        steps: int,
        plan_hash: str,
        on_event: OnEvent,
    ) -> None:
        """steps: updates of the whole run."""
        self.recipe, self.step, self.data, self.accelerator = recipe, step, data, accelerator
        self.folder, self.steps, self.plan_hash, self.on_event = folder, steps, plan_hash, on_event
        if step.strategy.micro_batch_tokens:
            self.data = data.in_batches_of(step.strategy.micro_batch_tokens)
        self.step_number, self.position, self.tokens = 0, Position(), 0
        self.skipped_steps = 0
        self.measured: Profile | None = None
        self.measured_peak_bytes: int | None = None
        self.measured_shapes: tuple[tuple[int, ...], ...] = ()
        self._meter: UseMeter | None = None
        self._tightening: Tightening | None = None
        self.checkpoint: Path | None = None
        self.last_loss: float | None = None
        self.last_held_out_loss: float | None = None
        self.checkpoints = Checkpoints(
            folder.checkpoints,
            step.ranks,
            keep=recipe.save.keep,
            asynchronous=not accelerator.shares_host_memory,
            on_saved=self._saved,
        )
        self.watch = StallWatch.of(step)
        if step.ranks.is_real:
            step.observer = self.watch.observe
        self._updates = 0  # of this process, unlike step_number
        self._seconds, self._own_tokens, self._timed_tokens, self._timed_seconds = 0.0, 0, 0, 0.0

    @property
    def held_out_indices(self) -> Indices:
        """The held-out sequences of every evaluation: the same ones whatever the strategy."""
        return self.data.held_out.spread(self.recipe.evaluation.batches * self.recipe.sequences_per_step)

    def watch_use(self, meter: UseMeter, budget_bytes: int) -> None:
        """Tighten the step's tiers where updates use more than the recipe's threshold of the budget."""
        switch, settings = self.step.tier_switch, self.recipe.per_batch or PerBatchSettings()
        assert switch is not None, "only a tier table can be tightened"
        if not self.step.ranks.any(not meter.works):
            self._meter = meter
            self._tightening = Tightening(int(settings.threshold * budget_bytes), switch.max_level)
        else:
            self.step.notes += ("tiers stay as planned: this system does not let a process reset its peak of memory",)

    def go(self, metrics: MetricsWriter | NoMetrics, stop: Callable[[], bool], measured: MeasuredUpdate | None) -> bool:
        """Updates until the last, or until stop() after one. Returns whether it was stopped before the last."""
        ranks, watch = self.step.ranks, self.watch
        stopped = ranks.any(stop())
        with Prefetch(self._windows(), self.accelerator) as source:
            while self.step_number < self.steps and not stopped:
                watch.begin("waiting for data")
                window, position = next(source)
                watch.begin_step(self.step_number + 1)
                done = self._update(window, measured)
                self.step_number, self.position = done.step, position
                values = {name: value for name, value in asdict(done).items() if name not in ("step", "steps", "epoch")}
                metrics.write(done.step, values)
                self.on_event(done)
                self._tighten_or_relax(done)
                stopped = ranks.any(stop()) and self.step_number < self.steps
                if stopped:
                    self.on_event(Interrupted(self.step_number))
                elif self._due(self.recipe.evaluation.every):
                    watch.begin("evaluating")
                    self._evaluate(metrics, window)
                if stopped or self._due(self.recipe.save.every):
                    with watch.waiting_allowed("saving"):
                        self._save()
        if self.measured is None and self._updates >= MEASURED_UPDATE:
            self.measured_peak_bytes = self.accelerator.memory.peak_bytes()
        return stopped

    def _windows(self) -> Iterator[tuple[list[MicroBatch], Position]]:
        """This rank's micro batches of one update after another."""
        share = self.step.ranks.data_index, self.step.ranks.mesh.data
        size = self.step.strategy.micro_batch_size
        return windows(
            self.data.train, size, self.recipe.sequences_per_step, self.position, self.recipe.seed, share=share
        )

    def _due(self, every: int) -> bool:
        return self.step_number % every == 0 or self.step_number == self.steps

    def _update(self, window: list[MicroBatch], measured: MeasuredUpdate | None) -> StepDone:
        optimizer = self.recipe.optimizer
        update = self.step_number - self.skipped_steps
        rate = learning_rate_at(update, self.steps, optimizer.learning_rate, self.recipe.schedule)
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate
        if self._meter is not None:
            self._meter.begin()
        began = time.perf_counter()
        result = self._run_step(window, measured)
        loss = float(result.loss)  # waits for the device, so the clock stops after the update and not before
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        seconds = time.perf_counter() - began
        self._check_finite(result, loss, norm, rate)
        self._check_skips(result, window)
        self._count(result.num_tokens, seconds)
        return StepDone(
            step=self.step_number + 1,
            steps=self.steps,
            epoch=self.position.epoch,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            tokens=self.tokens,
            tokens_per_second=result.num_tokens / seconds,
            step_seconds=seconds,
            memory_bytes=self.accelerator.memory.current_bytes(),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            micro_batches=len(window),
            **self._use(),
        )

    def _use(self) -> dict[str, int | None]:
        """What the update that has just run used at its peak, the most of all ranks, and under which level."""
        if self._meter is None or self.step.tier_switch is None:
            return {}
        own = self._meter.used_bytes()
        if self.measured is not None and self._updates == MEASURED_UPDATE:
            own = self._meter.recorded(self.measured.peak_bytes)
        used = max(each[0] for each in self.step.ranks.everyones([own]))
        return {"used_bytes": used or None, "tier_level": self.step.tier_switch.level}

    def _tighten_or_relax(self, done: StepDone) -> None:
        """See NOTE [ Measured use ] in tightening.py."""
        tightening, switch, meter = self._tightening, self.step.tier_switch, self._meter
        if tightening is None or switch is None or meter is None or done.used_bytes is None:
            return
        if (change := tightening.after(done.used_bytes)) is not None:
            if change == "tightened":
                meter.shrink()
            switch.level = tightening.level
            limit = tightening.limit_bytes
            self.on_event(TiersChanged(done.step, change, tightening.level, switch.max_level, done.used_bytes, limit))

    def _run_step(self, window: list[MicroBatch], measured: MeasuredUpdate | None) -> StepResult:
        self._updates += 1
        if self._updates != MEASURED_UPDATE:
            return self.step(window)
        if measured is None:
            self.accelerator.memory.reset_peak()
            return self.step(window)
        result, self.measured = measured.run(self.step, lambda: self.step(window))
        self.measured_peak_bytes = self.measured.peak_bytes
        if self.step.tier_switch is None or self.step.tier_switch.level == 0:
            self.measured_shapes = tuple(tuple(batch.labels.shape) for batch in window)
        self.on_event(Measured(self.step_number + 1, self.measured))
        return result

    def _check_finite(self, result: StepResult, loss: float, norm: float | None, rate: float) -> None:
        if result.skipped or (isfinite(loss) and (norm is None or isfinite(norm))):
            self.last_loss = loss if isfinite(loss) else self.last_loss
            return
        before = "none" if self.last_loss is None else f"{self.last_loss:.3f}"
        saved = f"{self.checkpoint} is from before it" if self.checkpoint else "nothing is saved yet"
        raise TrainfitError(
            f"training diverged at step {self.step_number + 1}: loss {loss:g}, gradient norm {norm}, learning rate "
            f"{rate:.2e} (loss of the step before: {before}; {saved}); lower optimizer.learning_rate or raise "
            "schedule.warmup_steps"
        )

    def _check_skips(self, result: StepResult, window: list[MicroBatch]) -> None:
        self.skipped_steps += result.skipped
        scaling = self.step.scaling
        if not result.skipped or scaling is None or scaling.skips_in_a_row < scaling.setting.max_skips:
            return
        found = together(lambda: find_overflow(self.step, window))
        where = next(
            (f"{each}, on rank {rank}" if len(found) > 1 else str(each) for rank, each in enumerate(found) if each),
            None,
        )
        raise TrainfitError(
            f"{scaling.skips_in_a_row} steps in a row overflowed and were skipped, the last at loss scale "
            f"{result.loss_scale:g}, step {self.step_number + 1}: {where or 'run again, all is finite'}; set "
            "precision: bf16, lower optimizer.learning_rate, or keep what that module computes within 65504"
        )

    def _count(self, num_tokens: int, seconds: float) -> None:
        self.tokens += num_tokens
        self._seconds += seconds
        self._own_tokens += num_tokens
        # The first updates are slow (warm-up, measuring) and would hide what the rest of the run does.
        if self._updates > MEASURED_UPDATE:
            self._timed_tokens += num_tokens
            self._timed_seconds += seconds

    def _evaluate(self, metrics: MetricsWriter | NoMetrics, window: list[MicroBatch]) -> None:
        batch_size = self.step.strategy.micro_batch_size
        loss = held_out_loss(self.step.evaluate, self.data.held_out, self.held_out_indices, batch_size, self.step.ranks)
        self.last_held_out_loss = loss
        underflow = count_underflow(self.step, window)
        shares = {} if underflow is None else {f"underflow_{name}": share for name, share in asdict(underflow).items()}
        metrics.write(self.step_number, {"held_out_loss": loss, **shares})
        self.on_event(Evaluated(self.step_number, loss, underflow))

    def _save(self) -> None:
        recipe = self.recipe
        state = RunState(
            self.step_number,
            self.position,
            self.tokens,
            recipe.to_json(),
            recipe.hash,
            self.plan_hash,
            self.skipped_steps,
            None if self.step.scaling is None else self.step.scaling.state(),
        )
        self.checkpoints.save(state, self.step.model, self.step.optimizer, self.accelerator.rng.get_state())

    def _tokens_per_second(self) -> float:
        """Of the updates after the slow first ones, or of all where there are no others."""
        if self._timed_seconds:
            return self._timed_tokens / self._timed_seconds
        return self._own_tokens / self._seconds if self._seconds else 0.0

    def _saved(self, step: int, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.on_event(Saved(step, checkpoint))

    def report(self, *, interrupted: bool, unigram_loss: float, total_seconds: float) -> TrainReport:
        """What the run came to."""
        return TrainReport(
            run_folder=self.folder.path,
            steps=self.step_number,
            planned_steps=self.steps,
            skipped_steps=self.skipped_steps,
            interrupted=interrupted,
            final_loss=self.last_loss,
            held_out_loss=None if interrupted else self.last_held_out_loss,
            unigram_loss=unigram_loss,
            tokens=self.tokens,
            tokens_per_second=self._tokens_per_second(),
            seconds=self._seconds,
            total_seconds=total_seconds,
            measured_peak_bytes=self.measured_peak_bytes,
            measured=self.measured,
            measured_shapes=self.measured_shapes,
            checkpoint=self.checkpoint,
        )
