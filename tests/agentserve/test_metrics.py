"""What happened can be read back from the exposition text."""

from __future__ import annotations

from agentserve.deadlines import DeadlineStatus
from agentserve.metrics import Metrics
from agentserve.worker.client import WorkerClient
from agentserve.worker.messages import Load, TurnFailed, TurnFinished
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.supervisor import Supervisor

FINISHED = TurnFinished(
    turn_id="t",
    reason="stop",
    prompt_tokens=100,
    output_tokens=7,
    reused_tokens=60,
    written_tokens=47,
    queue_s=0.0,
    restore_s=0.02,
    prefill_s=0.1,
    ttft_s=0.2,
    decode_s=0.5,
    tier="ram",
    predicted_ttft_s=0.23,
)
LOAD = Load(
    running=2,
    waiting=1,
    waiting_prefill_tokens=500,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=50.0,
    restore_bytes_per_s=1e9,
    free_pages=10,
    total_pages=20,
    cache_bytes={"ram": 4096},
    cache_checkpoints={"ram": 3},
    counters={"held": 4},
)


def test_turns_deadlines_and_load_appear_with_their_values() -> None:
    metrics = Metrics()
    metrics.turn_ended(FINISHED)
    metrics.turn_ended(TurnFailed("u", "deadline_exceeded", "late"))
    metrics.deadline(DeadlineStatus.MET)
    metrics.deadline(DeadlineStatus.MISSED, warned=True)
    metrics.socket_opened()
    metrics.socket_opened()
    metrics.socket_closed()
    supervisor = Supervisor(WorkerClient(), WorkerSettings(model_dir="", model_name="m", state_dir=""))
    supervisor.restarts = 2
    metrics.watch_worker("m/1", supervisor)
    supervisor.client.receive(LOAD)
    lines = metrics.render().decode().splitlines()
    for line in (
        'agentserve_ttft_seconds_count{tier="ram"} 1.0',
        'agentserve_prompt_tokens_total{source="restored"} 60.0',
        'agentserve_prompt_tokens_total{source="prefilled"} 40.0',
        "agentserve_output_tokens_total 7.0",
        "agentserve_predicted_ttft_seconds_count 1.0",
        'agentserve_ttft_error_ratio_bucket{le="0.1"} 0.0',
        'agentserve_ttft_error_ratio_bucket{le="0.15"} 1.0',
        'agentserve_reuse_ratio_bucket{le="0.5"} 0.0',
        'agentserve_reuse_ratio_bucket{le="0.75"} 1.0',
        'agentserve_deadline_warnings_total{first="at_risk",status="missed"} 1.0',
        'agentserve_turns_total{outcome="deadline_exceeded"} 1.0',
        'agentserve_deadlines_total{status="met"} 1.0',
        "agentserve_open_sockets 1.0",
        'agentserve_checkpoint_bytes{tier="ram",worker="m/1"} 4096.0',
        'agentserve_worker_counter{name="held",worker="m/1"} 4.0',
        'agentserve_worker_restarts{worker="m/1"} 2.0',
        'agentserve_worker_ready{worker="m/1"} 0.0',
    ):
        assert line in lines


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    first, second = Metrics(), Metrics()
    first.turn_ended(FINISHED)
    assert b"agentserve_output_tokens_total 0.0" in second.render()


def test_a_counter_is_one_series() -> None:
    metrics = Metrics()
    metrics.turn_ended(FINISHED)
    assert b"_created" not in metrics.render()
