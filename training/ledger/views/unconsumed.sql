-- Pairs of a run's datasets that no current step of it has learned from yet; those held out are among them.
create or replace view unconsumed as
select d.run_id, p.*
from run_dataset as d
join pair as p using (dataset)
where not exists (
    select 1
    from current_step_pair as t
    where t.run_id = d.run_id and t.dataset = p.dataset and t.shard = p.shard and t."row" = p."row"
);
