"""VPS: one coordinate space for all training state, and the way from any parallel layout of it to any other.

In reading order:

- `space`: the logical tensors of a model at parallel size 1, and the kinds of state over them.
- `layout`: which logical boxes each rank holds, and where in its physical buffers.
- `geometry`: intersections of boxes.
- `plan`: which box goes from which rank to which; where it lies on either.
- `cover`: whether a layout holds its space exactly.
- `rounds`: who exchanges with whom, when.
- `schedule`: rounds under a cap on memory, and the certificate.
- `permute`: which process takes which rank, so that most stays in place.
- `explain`: what it costs, as text.
- `hf`, `mesh`: a space from a Hugging Face config, and layouts of described meshes. `dtensor`: layouts of live modules.
- `trace` (with `affine`, `paper_engine`): the layout of an inference engine, from its own loader.
- `digest`: what a state is, whatever its layout. `memory`: memory that other processes can map.
- `transfer`: state moves.
- `publication`, `brief`: weights laid open for engines. `pull`, `reload`, `verify`, `vllm`: how engines take them over.
"""
