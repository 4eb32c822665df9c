"""The neighbor graph: neighbors at the price of a table look-up, with a recall of nearly 1.

Brute force compares each query with every point. The graph inverts the work: it keeps for every
point a list of its C nearest others (C about 3k), and keeps the lists right as points come, go and
change their weight. A query then reads the first k entries of a list.

- *Lists are made when they are asked for* (`_build`), by one sweep of matrix products over all
  points. Storages that were filled before cost nothing until they are sampled.
- *Arrivals wait* until a block of them is worth a sweep (`_insert`), which offers each to all lists
  and makes its own. Meanwhile queries compare with those that wait (`_with_arrivals`), so that no
  answer is stale. An overwritten point counts as gone at once; with the next block it is taken out
  of the lists that hold it.
- *A sweep never sorts*: a bound on what can matter to a row, or to a column, leaves few pairs.
- *The scale drifts* with the statistics. Lists are kept in order under a working scale; when the
  current one has drifted a little from it, it is taken up, and all lists are put into order anew
  (`_rescore`). Only drift between dimensions matters: a common factor changes no order.

Each list has a reach: no point outside of it is nearer than that. Whatever becomes of a list, its
reach stays a certificate: it shrinks by the worst that a change of the scale can have done to any
distance, and to a lower bound of the nearest point that found no room. A list with fewer than k
entries within its reach is made anew when it is asked for, so that answers are those of brute force
under the working scale. With `exact=True` they are proven under the very scale of the query, or
searched again.

`scaled_points.py` measures distances under the working scale, `lists.py` holds the lists, and
`graph.py` decides what is done when.
"""

from nmer_torchrl.neighbors.graph.graph import NeighborGraph

__all__ = ["NeighborGraph"]
