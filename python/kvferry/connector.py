"""What connectors of engines are made of: a scheduler half and a worker half, with plain bytes between them.

An adapter calls the `SchedulerHalf` where its engine schedules requests, and a `WorkerHalf` in the process of each
rank. It carries `SchedulerHalf.step` to `WorkerHalf.apply` of every rank, and the last item of `WorkerHalf.reports` to
`SchedulerHalf.reported`. `kvferry.vllm` is such an adapter.
"""

from __future__ import annotations

from kvferry._kvferry import Exchange, SchedulerHalf, WorkerHalf, counted_reasons, log_to_stderr, prompt_id

__all__ = ["Exchange", "SchedulerHalf", "WorkerHalf", "counted_reasons", "log_to_stderr", "prompt_id"]
