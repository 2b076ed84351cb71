"""Channels: items go from the members that make them straight to the members that read them.

Read in this order:

- `channel`: `Channel`, an end: put, get, get_batch, close. What users call.
- `spec`: what members agree on: `ChannelSpec`, `Address`, where a member is. `errors`: what can go wrong.
- `member`: `Member`, a process that takes part, and what it has put and still holds; `reach`: how it comes at what
  others put.
- `codec`: any value as a small pickle and the memory of its tensors. `pool`, `ranges`: the memory they are put in.
- `transports`: the ways between two members, one in each file; `choice`: which one a pair takes.
- `broker`: the server that hands on what lies where, and never a payload; around the `book` of members, the `room` of
  each channel and the `queue` of each key, which are plain state machines. `statistics`, `account`: what they
  count, and say of themselves.
- `link`, `wire`: the connection to the broker, and its messages.

Beside them, for the rows of a run (`rlinf.wire`): `routing` (which rank gets which rows; pure), `mailbox` (where a
rank's incoming rows wait).
"""
