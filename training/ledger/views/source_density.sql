-- What each source gave to each run: loss density, shares, and how well its pairs are told apart.
-- Steps whose counters are unknown are left out of the sums and counted.
create or replace view source_density as
select
    run_id, source,
    count(loss_tokens) as steps,
    count(*) - count(loss_tokens) as unknown_steps,
    sum(pairs)::bigint as pairs,
    sum(source_tokens)::bigint as source_tokens,
    sum(logical_tokens)::bigint as logical_tokens,
    sum(loss_tokens)::bigint as loss_tokens,
    sum(loss_tokens) / nullif(sum(source_tokens), 0) as loss_density,
    sum(source_tokens) / nullif(sum(logical_tokens), 0) as sharing,
    sum(source_tokens) / nullif(sum(sum(source_tokens)) over (partition by run_id), 0) as share_of_source_tokens,
    sum(loss_tokens) / nullif(sum(sum(loss_tokens)) over (partition by run_id), 0) as share_of_loss_tokens,
    sum(loss_sum) filter (pairs is not null) / nullif(sum(pairs) filter (loss_sum is not null), 0) as mean_loss,
    sum(wins) filter (pairs is not null) / nullif(sum(pairs) filter (wins is not null), 0) as accuracy,
    sum(chosen_reward_sum - rejected_reward_sum) filter (pairs is not null)
        / nullif(sum(pairs) filter (chosen_reward_sum - rejected_reward_sum is not null), 0) as margin
from current_step_source
group by run_id, source;
