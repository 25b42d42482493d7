-- Every time a pair was learned from, with where it came from. `margin` is in nats: beta times it is the reward margin.
create or replace view pair_history as
select
    t.run_id, t.pair_id, t.occurrence, t.step, s.epoch, t.attempt, t.dataset, t.shard, t."row", p.source, p.locator,
    shard.file, p.prompt_tokens, p.chosen_tokens, p.rejected_tokens,
    t.policy_chosen_logp, t.policy_rejected_logp, t.reference_chosen_logp, t.reference_rejected_logp,
    (t.policy_chosen_logp - t.policy_rejected_logp)
        - coalesce(t.reference_chosen_logp - t.reference_rejected_logp, 0) as margin,
    t.loss
from current_step_pair as t
join current_step as s using (run_id, attempt, step)
left join pair as p on p.dataset = t.dataset and p.shard = t.shard and p."row" = t."row"
left join shard on shard.dataset = t.dataset and shard.shard = t.shard;
