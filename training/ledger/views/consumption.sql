-- Which dataset, shard and source fed which step, with the tokens its pairs have in the shards.
create or replace view consumption as
select
    t.run_id, t.step, s.epoch, t.dataset, t.shard, p.source,
    count(*) as pairs,
    sum(p.prompt_tokens)::bigint as prompt_tokens,
    sum(p.chosen_tokens)::bigint as chosen_tokens,
    sum(p.rejected_tokens)::bigint as rejected_tokens,
    sum(p.chosen_loss_tokens + p.rejected_loss_tokens)::bigint as loss_tokens
from current_step_pair as t
join current_step as s using (run_id, attempt, step)
left join pair as p on p.dataset = t.dataset and p.shard = t.shard and p."row" = t."row"
group by t.run_id, t.step, s.epoch, t.dataset, t.shard, p.source;
