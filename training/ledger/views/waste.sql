-- Steps that were computed and do not count, with the attempt that voided them.
create or replace view waste as
select
    step.run_id, step.attempt, step.step, min(later.attempt) as voided_by,
    any_value(step.pairs) as pairs,
    any_value(step.physical_tokens) as physical_tokens,
    any_value(step.source_tokens) as source_tokens,
    any_value(step.loss_tokens) as loss_tokens,
    any_value(step.flops) as flops,
    any_value(step.data_s + step.compute_s + step.optimizer_s) as seconds
from step
join attempt as later
    on later.run_id = step.run_id and later.attempt > step.attempt and later.from_step <= step.step
group by step.run_id, step.attempt, step.step;
