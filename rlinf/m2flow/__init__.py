"""M2Flow: from what a workflow does (macro flow) to where and when it is done (micro flow).

Read in this order: `stage` (what a worker's method declares about itself), `graph` (the macro flow that a user
builds), `plan` (where stages run, as plain data), `compiler` (graph + plan -> a program for each worker group),
`executor` (a rank interprets its program), `lease` (who may use a device now), `host` (sources and maps).
"""
