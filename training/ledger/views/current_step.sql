-- Steps that count: those that no later attempt made again or gave up by starting before them.
create or replace view current_step as
select step.*
from step
where not exists (
    select 1
    from attempt as later
    where later.run_id = step.run_id and later.attempt > step.attempt and later.from_step <= step.step
);
