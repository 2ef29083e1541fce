"""Any order of requests, messages and losses: no wrong block is ever handed over, and everything comes back once.

C01, C02, C03, C25, C30: the machines of both sides under a link that delivers, delays, repeats, damages, replays,
loses and ends at will, with engines that reuse every block at once when its transfer has ended.
"""

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.events import TransferAcked, TransferComplete
from kvtransfer.messages import Blocks
from kvtransfer.ticket import Ticket
from tests.kvtransfer.two_machines import (
    NUM_BLOCKS,
    SETTINGS,
    SINK_TIMEOUT_S,
    TO_SINK,
    TO_SOURCE,
    Transfer,
    TwoMachines,
)
from tests.kvtransfer.worlds import keys_for


class Interleavings(TwoMachines, RuleBasedStateMachine):
    # What engines do.

    @rule(num_blocks=st.integers(0, 5), num_cached=st.integers(0, 3), is_expected=st.integers(0, 9))
    def begin(self, num_blocks: int, num_cached: int, is_expected: int) -> None:
        num_cached = min(num_cached, num_blocks)
        num_to_send = num_blocks - num_cached
        if num_to_send > len(self.free_source) or num_blocks > len(self.free_sink):
            return
        name = f"t{len(self.transfers)}"
        made = Transfer(
            transfer_id=name,
            num_cached=num_cached,
            source_ids=[self.free_source.pop() for _ in range(num_to_send)],
            sink_ids=[self.free_sink.pop() for _ in range(num_blocks)],
        )
        for block in made.sink_ids:
            self.engine_patterns.pop(block, None)
        made.patterns = [self.source_store.fill(block, f"{name}.{i}") for i, block in enumerate(made.source_ids)]
        self.transfers[name] = made
        if is_expected:
            self.sink.expect(name, made.sink_ids, num_cached, SINK_TIMEOUT_S)
        else:
            self.return_to_sink(made)  # a ticket whose reservation is already gone
        self.source.open(Ticket(name, "d0", num_cached, num_blocks))
        self.settle()

    @rule(num_blocks=st.integers(1, 5))
    def begin_whole(self, num_blocks: int) -> None:
        """A prompt of one chunk: all blocks and the end are given at once."""
        num_before = len(self.transfers)
        self.begin(num_blocks, 0, is_expected=1)
        if len(self.transfers) > num_before:
            made = self.transfers[f"t{num_before}"]
            made.num_sent = num_blocks
            self.source.send(made.transfer_id, list(enumerate(made.source_ids)))
            self.end(made)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), count=st.integers(1, 5))
    def send(self, data: st.DataObject, count: int) -> None:
        made = self.pick(data)
        if made.is_finished or made.source_end is not None:
            return
        chunk = range(made.num_sent, min(made.num_sent + count, len(made.source_ids)))
        made.num_sent = max(made.num_sent, chunk.stop)
        self.source.send(made.transfer_id, [(made.num_cached + i, made.source_ids[i]) for i in chunk])
        self.settle()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        made = self.pick(data)
        if made.num_sent == len(made.source_ids) and not made.is_finished:
            self.end(made)

    def end(self, made: Transfer) -> None:
        made.is_finished = True
        self.source.finish(made.transfer_id, keys_for(len(made.sink_ids)), made.transfer_id.encode())
        self.settle()

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), who=st.sampled_from(["source", "sink", "both"]))
    def cancel(self, data: st.DataObject, who: str) -> None:
        made = self.pick(data)
        if who != "sink":
            self.source.cancel(made.transfer_id, "given up")
        if who != "source":
            self.sink.cancel(made.transfer_id, "given up")
        self.settle()

    def pick(self, data: st.DataObject) -> Transfer:
        return self.transfers[data.draw(st.sampled_from(sorted(self.transfers)))]

    # What the link does.

    @rule(way=st.sampled_from([TO_SINK, TO_SOURCE]), count=st.integers(1, 6))
    def deliver(self, way: str, count: int) -> None:
        for _ in range(count):
            queue = self.queue(way)
            if queue:
                self.arrive(way, queue.popleft())

    @rule()
    def deliver_all(self) -> None:
        while self.source_out.sent or self.sink_out.sent:
            self.deliver(TO_SINK, 1)
            self.deliver(TO_SOURCE, 1)

    @rule(data=st.data(), way=st.sampled_from([TO_SINK, TO_SOURCE]))
    def deliver_out_of_order(self, data: st.DataObject, way: str) -> None:
        queue = self.queue(way)
        if queue:
            position = data.draw(st.integers(0, len(queue) - 1))
            parcel = queue[position]
            del queue[position]
            self.is_in_order = self.is_in_order and position == 0
            self.arrive(way, parcel)

    @rule(data=st.data(), way=st.sampled_from([TO_SINK, TO_SOURCE]))
    def lose(self, data: st.DataObject, way: str) -> None:
        queue = self.queue(way)
        if queue:
            position = data.draw(st.integers(0, len(queue) - 1))
            queue[position].handle.done = True
            del queue[position]
            self.tick()

    @rule(data=st.data(), way=st.sampled_from([TO_SINK, TO_SOURCE]))
    def replay(self, data: st.DataObject, way: str) -> None:
        """Something that was delivered once, on this or an earlier link, comes again."""
        seen = [parcel for its_way, parcel in self.history if its_way == way]
        if seen:
            parcel = data.draw(st.sampled_from(seen))
            self.arrive(way, parcel.copy(), is_replay=True)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        queue = [parcel for parcel in self.queue(TO_SINK) if parcel.frames]
        if queue:
            parcel = data.draw(st.sampled_from(queue))
            damaged = bytearray(parcel.frames[0])
            damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1
            parcel.handle.done = True
            parcel.frames = [memoryview(bytes(damaged)), *(memoryview(bytes(f)) for f in parcel.frames[1:])]
            self.num_damaged += 1
            self.tick()

    @rule()
    def cut(self) -> None:
        self.end_link("cut by the test")
        self.connect()

    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0, 13.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.tick()

    # What has to hold.

    @invariant()
    def blocks_that_came_back_are_left_alone(self) -> None:
        for block, pattern in self.engine_patterns.items():
            assert bytes(self.sink_store.view(block)) == pattern, f"block {block} was written after its transfer ended"

    @invariant()
    def pins_hold_while_bytes_may_be_read(self) -> None:
        for parcel in self.source_out.sent:
            if parcel.frames and not parcel.handle.done:
                message = parcel.message
                assert isinstance(message, Blocks)
                assert self.transfers[message.transfer_id].source_end is None, "unpinned while the transport reads"

    @invariant()
    def queued_bytes_stay_within_the_window(self) -> None:
        """Where the link keeps the order, as every carrier does: a Cancel that passes its blocks frees their credit."""
        queued = sum(frame.nbytes for parcel in self.source_out.sent for frame in parcel.frames)
        assert queued <= SETTINGS.window_bytes or not self.is_in_order

    def teardown(self) -> None:
        """With nothing more going wrong, time alone ends every transfer, and the link is as good as new."""
        for _ in range(100):
            self.deliver_all()
            self.wait(2.0)
        for made in self.transfers.values():
            assert made.source_end is not None, f"{made.transfer_id} never ended at the source"
            is_reserved = not set(made.sink_ids) <= self.free_sink
            assert made.sink_end is not None or not is_reserved, f"{made.transfer_id} never ended at the sink"
        assert len(self.free_source) == len(self.free_sink) == NUM_BLOCKS
        assert not self.source.is_waiting
        assert not self.sink.is_waiting
        self.check_link_still_works()

    def check_link_still_works(self) -> None:
        """All of the credit is there: five blocks pass a window of three."""
        self.begin_whole(5)
        made = self.transfers[f"t{len(self.transfers) - 1}"]
        self.deliver_all()
        assert isinstance(made.source_end, TransferAcked)
        assert isinstance(made.sink_end, TransferComplete)


Interleavings.TestCase.settings = hypothesis_settings(max_examples=100, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
