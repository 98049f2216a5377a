"""All small changes of the shardings of a program, ranked by the compiler's own propagation.

The path of a suggestion: `advice.with_advice` begins and ends it. `search.Search` goes in rounds:
`proposals` scores all `neighbours` of the program (`rank`), `edits` makes them changes of it, and
`trials` compiles the best. `advice.Advice` makes a `Finding` of what is kept, in the words of
`words.Words`, and of the `costs.Cost` that it lowers most. What no neighbour is, a `shard_map`
(`per_device`) or another placement of optimizer states, is tried before.
"""
