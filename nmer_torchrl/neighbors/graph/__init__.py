"""The neighbor graph: queries cost a table look-up, with a recall of nearly 1.

Brute force compares each query with every point. The graph instead keeps, for every point, a list
of its C nearest neighbors (C is about 3k). It updates the lists as points are written and
overwritten and as the scale changes. A query then reads the first k entries of a list.

- *Lists are built when they are queried* (`_build`), by one sweep of matrix products over all
  points. A storage that was filled before costs nothing until it is sampled.
- *New points wait* until there are enough for a sweep (`_insert`), which offers each to all lists
  and builds its own list. Until then, queries also compare with the waiting points
  (`_with_arrivals`), so that no answer is stale. An overwritten point is ignored at once, and
  removed from the lists with the next block.
- *A sweep never sorts*: bounds for rows and columns leave few pairs to consider.
- *The scale drifts* with the statistics. Lists are ordered under a working scale. When the current
  scale has drifted a little, it becomes the working scale, and all lists are reordered
  (`_rescore`). Only drift between dimensions matters: a common factor does not change the order.

Each list has a reach: no point outside the list is nearer than that. The reach stays valid through
all updates. When the scale changes, it shrinks by the worst case for any distance. When a point
does not fit into the list, it shrinks to a lower bound of that point's distance. A list with fewer
than k entries within its reach is rebuilt when it is queried, so that answers equal brute force
under the working scale. With `exact=True`, answers are proven under the exact scale of the query,
or searched again.

`scaled_points.py` measures distances under the working scale, `lists.py` holds the lists, and
`graph.py` decides when to update them.
"""

from nmer_torchrl.neighbors.graph.graph import NeighborGraph

__all__ = ["NeighborGraph"]
