"""TrainingDisplay: a run's events as a progress bar on a terminal, as a few plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from trainfit.train import (
    Archived,
    Evaluated,
    Event,
    Interrupted,
    Measured,
    Preparing,
    Resumed,
    Saved,
    Started,
    StepDone,
    TiersChanged,
)
from trainfit.units import format_bytes, format_count, format_seconds

_PLAIN_LINES = 10  # of progress in a whole run where there is no terminal
_PLAIN_SECONDS = 20.0  # and never longer without one
_SMOOTHING = 0.1  # weight of the newest step in the speed that is shown
_WARM_UP = 2  # updates that are slow: the first, and the second, which is recorded


class TrainingDisplay:
    """Draws events. Memory is the measured peak of a step, the same for every step, against the budget."""

    def __init__(self, console: Console, budget_bytes: int) -> None:
        self._console = console
        self._budget = format_bytes(budget_bytes)
        self._memory = f"budget {self._budget}"
        self._pace = _Pace(first_step=0)
        self._task: TaskID | None = None
        self._preparing = ""
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[facts]}"),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> TrainingDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def on_event(self, event: Event) -> None:
        """Draw one event of train()."""
        match event:
            case Preparing():
                self._draw_preparing(event)
            case Started():
                self._draw_started(event)
            case StepDone():
                self._draw_step(event)
            case Measured():
                self._memory = f"peak {_of(format_bytes(event.profile.peak_bytes), self._budget)}"
            case Evaluated():
                self._say(f"step {event.step}: held-out loss [bold]{event.held_out_loss:.3f}[/]")
            case Interrupted():
                self._say(f"[yellow]stopping after step {event.step}: saving[/]")
            case Archived():
                self._say(f"[yellow]note:[/] the earlier run of this folder is now in {escape(str(event.folder))}")
            case Resumed():
                self._draw_resumed(event)
            case TiersChanged():
                self._draw_tiers(event)
            case Saved():
                pass  # the last one is in the summary; a line for each would push the losses away

    def _say(self, markup: str) -> None:
        self._progress.console.print(markup)

    def _draw_preparing(self, event: Preparing) -> None:
        if event.what != self._preparing:
            self._remove_task()
            self._preparing = event.what
            self._task = self._progress.add_task(event.what, total=event.total, facts="")
            if not self._console.is_terminal:
                self._say(f"{event.what} ...")
        assert self._task is not None
        facts = f"{format_bytes(event.done)} of {format_bytes(event.total)}" if event.total > 1 else ""
        self._progress.update(self._task, completed=event.done, facts=facts)

    def _draw_resumed(self, event: Resumed) -> None:
        self._say(f"resumed at step {event.step} from {escape(str(event.checkpoint))}")
        if event.changed:
            self._say(f"[yellow]note:[/] changed since it was saved: {escape(', '.join(event.changed))}")
        if event.plan_changed:
            self._say("[yellow]note:[/] the plan is another one: losses agree with the unbroken run's but for rounding")

    def _draw_started(self, event: Started) -> None:
        self._remove_task()
        model, text = format_count(event.num_parameters), format_count(event.training_tokens)
        self._say(
            f"Training {model} parameters on {text} tokens for {event.steps} steps; unigram loss of the held-out "
            f"text {event.unigram_loss:.3f}"
        )
        for note in event.notes:
            self._say(f"[yellow]note:[/] {escape(note)}")
        self._pace = _Pace(event.step)
        self._task = self._progress.add_task("step", total=event.steps, completed=event.step, facts="")

    def _draw_tiers(self, event: TiersChanged) -> None:
        used, limit = format_bytes(event.used_bytes), format_bytes(event.limit_bytes)
        why = "above" if event.change == "tightened" else "well below"
        self._say(
            f"[yellow]note:[/] step {event.step} used {used}, {why} the {limit} of per_batch.threshold: tiers are "
            f"{event.change} to row +{event.level} of {event.max_level}; gradients do not change"
        )

    def _draw_step(self, event: StepDone) -> None:
        self._pace.add(event)
        number = str(event.step).rjust(len(str(event.steps)))
        loss = "skipped" if event.skipped else f"{event.loss:.3f}"
        facts = (
            f"{number}/{event.steps}  loss [bold]{loss}[/]  {format_count(self._pace.speed)} tok/s"
            f"  {self._memory}  {self._pace.time_left(event)}"
        )
        if self._task is not None:
            self._progress.update(self._task, completed=event.step, facts=facts)
        if not self._console.is_terminal and self._is_due(event):
            self._say(f"step {facts}".rstrip())
            self._last_line = time.monotonic()

    def _is_due(self, event: StepDone) -> bool:
        """A line now and then, the last step, and soon after the start: nobody should wait to see that it runs."""
        every = max(1, event.steps // _PLAIN_LINES)
        waited = time.monotonic() - self._last_line
        return event.step % every == 0 or event.step == event.steps or waited > _PLAIN_SECONDS

    def _remove_task(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


class _Pace:
    """Tokens a second, smoothed, and the time left; the slow first updates count for neither."""

    def __init__(self, first_step: int) -> None:
        """first_step: updates that a resumed run has behind it."""
        self._warm_at = first_step + _WARM_UP
        self._began = 0.0
        self.speed = 0.0

    def add(self, event: StepDone) -> None:
        if event.step <= self._warm_at:
            self._began = time.perf_counter()
        if event.step <= self._warm_at + 1:
            self.speed = event.tokens_per_second
        self.speed += _SMOOTHING * (event.tokens_per_second - self.speed)

    def time_left(self, event: StepDone) -> str:
        if event.step == event.steps:
            return "done"
        if (done := event.step - self._warm_at) < 1:
            return ""
        return f"{format_seconds((time.perf_counter() - self._began) / done * (event.steps - event.step))} left"


def _of(part: str, whole: str) -> str:
    """ "332.4 of 500.0 MiB": the unit once where both have the same."""
    (number, unit), whole_unit = part.split(), whole.split()[1]
    return f"{number} of {whole}" if unit == whole_unit else f"{part} of {whole}"
