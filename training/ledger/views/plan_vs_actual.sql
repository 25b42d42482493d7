-- What was predicted before the run against what the ledger says, counter by counter. The prediction is made anew by
-- each attempt for its topology; of steps made on another one, room and packs need not agree.
create or replace view plan_vs_actual as
with planned as (
    from (select * exclude (cost_max_over_mean) from predicted)
    unpivot (predicted for counter in (columns(* exclude (run_id, step))))
),
recorded as (
    from (
        select
            run_id, attempt, step, epoch, window_tokens, physical_tokens, aligned_tokens, source_tokens,
            logical_tokens, loss_tokens, chosen_loss_tokens, rejected_loss_tokens, documents, pairs, packs,
            empty_packs, max_document_tokens, sum_document_tokens_squared
        from current_step
    )
    unpivot include nulls (actual for counter in (columns(* exclude (run_id, attempt, step))))
),
reached as (
    select a.run_id, arg_max(a.outcome, a.attempt) as outcome, max(s.step) as last_step
    from attempt as a
    left join current_step as s using (run_id)
    group by a.run_id
),
mesh as (
    select
        run_id, attempt,
        (dp_replicate, dp_shard, cp, ulysses, pack_tokens) as mesh,
        last_value((dp_replicate, dp_shard, cp, ulysses, pack_tokens))
            over (partition by run_id order by attempt range between unbounded preceding and unbounded following)
            as planned_mesh
    from attempt
)
select
    run_id, step, counter, planned.predicted, recorded.actual, recorded.actual - planned.predicted as difference,
    case
        when recorded.step is null and (reached.outcome = 'finished' or step < reached.last_step) then 'missing'
        when recorded.step is null then 'pending'
        when planned.step is null then 'unplanned'
        when recorded.actual is null then 'unknown'
        when recorded.actual = planned.predicted then 'equal'
        when mesh.mesh is distinct from mesh.planned_mesh
            and counter in ('window_tokens', 'physical_tokens', 'packs', 'empty_packs') then 'other topology'
        else 'differs'
    end as status
from planned
full join recorded using (run_id, step, counter)
left join reached using (run_id)
left join mesh on mesh.run_id = recorded.run_id and mesh.attempt = recorded.attempt;
