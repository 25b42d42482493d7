-- Every place where plan, ledger and manifests disagree, to the integer; reconciliation fails unless it is empty.
create or replace view discrepancy as
with by_source as (
    from (
        select
            run_id, step, source, pairs, documents, source_tokens, logical_tokens, loss_tokens, chosen_loss_tokens,
            rejected_loss_tokens
        from current_step_source
    )
    unpivot include nulls (found for counter in (columns(* exclude (run_id, step, source))))
),
of_step as (
    from (
        select
            run_id, step, pairs, documents, source_tokens, logical_tokens, loss_tokens, chosen_loss_tokens,
            rejected_loss_tokens
        from current_step
    )
    unpivot (expected for counter in (columns(* exclude (run_id, step))))
),
traced as (
    select
        t.run_id, t.step, t.pair_id, p.pair_id as known_id, p.* exclude (pair_id),
        t.dataset || ' shard ' || t.shard || ' row ' || t."row" as place,
        t.occurrence,
        row_number() over (partition by t.run_id, t.dataset, t.shard, t."row" order by t.step) - 1 as seen,
        count(*) over (partition by t.run_id, t.step, t.dataset, t.shard, t."row") as times
    from current_step_pair as t
    left join pair as p on p.dataset = t.dataset and p.shard = t.shard and p."row" = t."row"
),
from_pairs as (
    from (
        select
            traced.run_id, traced.step, traced.source,
            count(*) as pairs,
            2 * count(*) as documents,
            sum(if(run.layout = 'shared', 1, 2) * prompt_tokens + chosen_tokens + rejected_tokens)::bigint
                as source_tokens,
            sum(2 * prompt_tokens + chosen_tokens + rejected_tokens)::bigint as logical_tokens,
            sum(chosen_loss_tokens + rejected_loss_tokens)::bigint as loss_tokens,
            sum(chosen_loss_tokens)::bigint as chosen_loss_tokens,
            sum(rejected_loss_tokens)::bigint as rejected_loss_tokens
        from traced
        join run using (run_id)
        where traced.source is not null
        group by traced.run_id, traced.step, traced.source
    )
    unpivot (expected for counter in (columns(* exclude (run_id, step, source))))
),
whole as (
    select
        dataset.dataset,
        unnest(['pairs', 'prompt_tokens', 'chosen_tokens', 'rejected_tokens']) as counter,
        unnest([any_value(dataset.pairs), any_value(dataset.prompt_tokens), any_value(dataset.chosen_tokens),
            any_value(dataset.rejected_tokens)]) as expected,
        unnest([count(pair.dataset), coalesce(sum(pair.prompt_tokens), 0), coalesce(sum(pair.chosen_tokens), 0),
            coalesce(sum(pair.rejected_tokens), 0)]) as found
    from dataset
    left join pair using (dataset)
    group by dataset.dataset
)
select run_id, 'plan = ledger' as rule, step, counter as subject,
    coalesce(predicted::varchar, status) as expected, coalesce(actual::varchar, status) as found
from plan_vs_actual
where status = 'differs' or (status in ('missing', 'unknown', 'unplanned') and counter = 'pairs')
union all
select run_id, 'step = sum of its sources', step, counter, any_value(expected)::varchar, sum(found)::varchar
from of_step
left join by_source using (run_id, step, counter)
group by run_id, step, counter
having any_value(expected) is distinct from coalesce(sum(found), 0)
union all
select run_id, 'source = lengths of its pairs in the shards', step, source || ' ' || counter,
    coalesce(expected, 0)::varchar, coalesce(found::varchar, 'none')
from by_source
full join from_pairs using (run_id, step, source, counter)
where expected is distinct from found
union all
select run_id, 'pair stands in a loaded dataset', step, place, pair_id, coalesce(known_id, 'no such row')
from traced
where known_id is distinct from pair_id
union all
select distinct run_id, 'pair once a step', step, place, '1', times::varchar
from traced
where times > 1
union all
select run_id, 'occurrence = times seen before', step, place, seen::varchar, occurrence::varchar
from traced
where occurrence <> seen
union all
select run_id, 'wins and ties are pairs', step, 'wins + ties', 'at most ' || pairs, (wins + ties)::varchar
from current_step
where wins + ties > pairs
union all
select used.run_id, 'manifest = shards', null, used.dataset || ' ' || whole.counter,
    whole.expected::varchar, whole.found::varchar
from run_dataset as used
join whole using (dataset)
where whole.expected <> whole.found
union all
select used.run_id, 'dataset of the run is loaded', null, used.dataset, used.path, 'not loaded'
from run_dataset as used
anti join dataset using (dataset);
