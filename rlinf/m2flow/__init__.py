"""M2Flow: from what a workflow does (macro flow) to where and when it is done (micro flow).

Read in this order:

- `stage`: what a worker's method declares about itself. `graph`: the macro flow that a user builds.
- `plan`: where stages run, as plain data. `compiler`: graph + plan -> a program for each worker group.
- `rows`: which rows a rank gets, and in which pieces. `inflow`: how pieces come together.
- `executor`: a rank interprets its program. `ports`: how rows come in and go out. `sync`: how weights do.
- `lease`: who may use a device now. `host`: sources and maps. `waits`: who waits for whom.
- `timeline`: what every rank did, and when. `simulate`: the same on paper, from `costs`.
- `readable`, `gantt`: a plan and its time line as text. `record`: what a run leaves: `trace`, and a page (`page`,
  `page_html`) that also says why devices stood still (`idle`).
"""
