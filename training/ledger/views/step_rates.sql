-- Shares and rates of each current step. Its seconds leave out metering, validation and saving.
create or replace view step_rates as
select
    s.run_id, s.attempt, s.step, s.epoch, s.ended_at, s.pairs, s.unknown_reason, s.nonfinite,
    s.source_tokens / nullif(s.window_tokens, 0) as pack_fill,
    s.source_tokens / nullif(s.physical_tokens, 0) as source_fill,
    s.loss_tokens / nullif(s.source_tokens, 0) as loss_density,
    s.loss_tokens / nullif(s.physical_tokens, 0) as loss_fill,
    s.source_tokens / nullif(s.logical_tokens, 0) as sharing,
    s.loss, s.grad_norm, s.learning_rate,
    s.wins / nullif(s.pairs, 0) as accuracy,
    s.ties / nullif(s.pairs, 0) as tied,
    s.chosen_reward_sum / nullif(s.pairs, 0) as chosen_reward,
    s.rejected_reward_sum / nullif(s.pairs, 0) as rejected_reward,
    (s.chosen_reward_sum - s.rejected_reward_sum) / nullif(s.pairs, 0) as margin,
    s.data_s + s.compute_s + s.optimizer_s as seconds,
    s.physical_tokens / nullif(seconds, 0) as physical_tokens_per_s,
    s.source_tokens / nullif(seconds, 0) as source_tokens_per_s,
    s.logical_tokens / nullif(seconds, 0) as logical_tokens_per_s,
    s.loss_tokens / nullif(seconds, 0) as loss_tokens_per_s,
    s.flops / nullif(seconds * a.peak_flops * a.dp_replicate * a.dp_shard * a.cp * a.ulysses, 0) as mfu
from current_step as s
left join attempt as a using (run_id, attempt);
