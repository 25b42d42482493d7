-- One row a run. Means weigh steps by their pairs; a non-finite loss is left out and counted, never averaged.
create or replace view run_summary as
with counted as (
    select
        s.run_id,
        count(*) as steps,
        count(*) filter (s.pairs is null) as unknown_steps,
        count(*) filter (s.nonfinite > 0) as nonfinite_steps,
        min(s.step) filter (s.nonfinite > 0) as first_nonfinite_step,
        sum(s.pairs)::bigint as pairs,
        sum(s.physical_tokens)::bigint as physical_tokens,
        sum(s.source_tokens)::bigint as source_tokens,
        sum(s.logical_tokens)::bigint as logical_tokens,
        sum(s.loss_tokens)::bigint as loss_tokens,
        sum(s.source_tokens) / nullif(sum(s.window_tokens), 0) as pack_fill,
        sum(s.source_tokens) / nullif(sum(s.physical_tokens), 0) as source_fill,
        sum(s.loss_tokens) / nullif(sum(s.source_tokens), 0) as loss_density,
        sum(s.loss_tokens) / nullif(sum(s.physical_tokens), 0) as loss_fill,
        sum(s.source_tokens) / nullif(sum(s.logical_tokens), 0) as sharing,
        sum(s.loss * s.pairs) / nullif(sum(s.pairs) filter (s.loss is not null), 0) as mean_loss,
        max(s.loss) as max_loss,
        sum(s.wins) filter (s.pairs is not null) / nullif(sum(s.pairs) filter (s.wins is not null), 0) as accuracy,
        arg_max(s.loss, s.step) as last_loss,
        sum(r.seconds) as seconds,
        sum(s.source_tokens) filter (r.seconds is not null)
            / nullif(sum(r.seconds) filter (s.source_tokens is not null), 0) as source_tokens_per_s,
        sum(r.mfu * r.seconds) / nullif(sum(r.seconds) filter (r.mfu is not null), 0) as mfu
    from current_step as s
    join step_rates as r using (run_id, attempt, step)
    group by s.run_id
),
started as (
    select
        run_id, count(*) as attempts, min(started_at) as started_at, arg_max(ended_at, attempt) as ended_at,
        arg_max(outcome, attempt) as outcome, count(gap) as attempts_with_gaps
    from attempt
    group by run_id
),
planned as (select run_id, count(*) as planned_steps from predicted group by run_id),
wasted as (select run_id, count(*) as wasted_steps, sum(seconds) as wasted_seconds from waste group by run_id)
select
    run.run_id, run.partition, run.layout, run.created_at, started.* exclude (run_id), planned.planned_steps,
    counted.* exclude (run_id), coalesce(wasted.wasted_steps, 0) as wasted_steps, wasted.wasted_seconds
from run
left join started using (run_id)
left join planned using (run_id)
left join counted using (run_id)
left join wasted using (run_id);
