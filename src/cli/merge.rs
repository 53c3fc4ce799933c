//! Puts the messages of several queues back into the order of the log.
//!
//! Each queue is a lane: what it has read ahead, and what is known about its end. A message may be given out when
//! no lane can still bring an earlier one: every lane has a message at hand, or is done, or is known to hold
//! nothing earlier. A reader that follows the end makes sure of the last with a [`Merge::check`]: what the other
//! queues hold *after* a message was received tells about everything before it, because messages become visible
//! in the order of the log.
//!
//! No I/O here: the caller reads pages and hands in what came.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    time::SystemTime,
};

use crate::client::Message;

/// Order of the log. A broker that does not tell log positions is ordered by store time.
type Key = (u64, Option<SystemTime>, u32, u64);

fn key(message: &Message) -> Key {
    (message.log_position.unwrap_or(0), message.stored, message.queue, message.offset)
}

/// The queues of one topic.
#[derive(Debug, Default)]
pub(super) struct Merge {
    lanes: Vec<Lane>,
    /// First message of each lane that has one, earliest on top.
    heads: BinaryHeap<Reverse<(Key, usize)>>,
    /// Lanes that have none and may hold an earlier one.
    unknown: usize,
    /// Lanes that have none and stand at the end of their queue as far as is known.
    resting: usize,
    /// Everything up to here has been received.
    complete: Option<Key>,
    /// Latest message received.
    latest: Option<Key>,
    /// What the check under way will prove complete.
    checking: Option<Key>,
}

#[derive(Debug)]
struct Lane {
    queue: u32,
    messages: VecDeque<Message>,
    /// Offset to ask for next.
    next: u64,
    /// Read up to here; `None`: follow.
    end: Option<u64>,
    /// The queue held nothing at `next` when it was last asked.
    at_end: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Head,
    Unknown,
    Resting,
    Done,
}

impl Lane {
    fn kind(&self) -> Kind {
        if !self.messages.is_empty() {
            Kind::Head
        } else if self.end.is_some_and(|end| self.next >= end) {
            Kind::Done
        } else if self.at_end {
            Kind::Resting
        } else {
            Kind::Unknown
        }
    }
}

/// What comes next.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// This message.
    Message(Box<Message>),
    /// Nothing before a page has come.
    Page,
    /// Nothing before a check has shown that the other queues hold nothing earlier.
    Check,
    /// Nothing ever: all lanes are done.
    End,
}

impl Merge {
    /// One more queue, read from `next` up to `end`, or followed. Lanes are numbered as they come.
    pub(super) fn add(&mut self, queue: u32, next: u64, end: Option<u64>) -> usize {
        let lane = Lane { queue, messages: VecDeque::new(), next, end, at_end: false };
        self.tell(lane.kind(), 1);
        self.lanes.push(lane);
        self.lanes.len() - 1
    }

    /// How many lanes there are.
    pub(super) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// What to ask the queue of `lane` for, while it has at most `low` messages at hand: queue, offset, and
    /// whether it stands at the end, so that asking means waiting.
    pub(super) fn wants(&self, lane: usize, low: usize) -> Option<(u32, u64, bool)> {
        let lane = self.lanes.get(lane)?;
        let done = lane.end.is_some_and(|end| lane.next >= end);
        (!done && lane.messages.len() <= low).then_some((lane.queue, lane.next, lane.at_end))
    }

    /// A page of `lane`: its messages, where it goes on, and whether the queue ends there.
    pub(super) fn page(&mut self, lane: usize, messages: Vec<Message>, next: u64, at_end: bool) {
        let Some(entry) = self.lanes.get_mut(lane) else { return };
        let before = entry.kind();
        let end = entry.end.unwrap_or(u64::MAX);
        for message in messages.into_iter().filter(|message| message.offset < end) {
            self.latest = self.latest.max(Some(key(&message)));
            entry.messages.push_back(message);
        }
        entry.next = next;
        entry.at_end = at_end;
        // What a queue does not have, it will not get before the end that was found when reading began.
        if at_end && entry.end.is_some() {
            entry.end = Some(next);
        }
        self.moved(lane, before);
    }

    /// The next message in order.
    pub(super) fn next(&mut self) -> Next {
        let Some(&Reverse((head, lane))) = self.heads.peek() else {
            return if self.unknown + self.resting == 0 { Next::End } else { Next::Page };
        };
        if self.unknown > 0 {
            return Next::Page;
        }
        if self.resting > 0 && self.complete < Some(head) {
            return Next::Check;
        }
        self.take(lane)
    }

    /// Whether there is exactly one message at hand and all other lanes rest.
    pub(super) fn is_alone(&self) -> bool {
        self.unknown == 0
            && self.heads.len() == 1
            && self.heads.peek().is_some_and(|&Reverse((_, lane))| {
                self.lanes.get(lane).is_some_and(|lane| lane.messages.len() == 1)
            })
    }

    /// The earliest message at hand, whatever the others may hold.
    pub(super) fn next_unchecked(&mut self) -> Next {
        match self.heads.peek() {
            Some(&Reverse((_, lane))) => self.take(lane),
            None => Next::Page,
        }
    }

    /// Begins a check: the queues whose ends are to be asked for, with their lanes. Also those that have messages
    /// at hand: when these are given out, others may stand between them and the next of another queue.
    pub(super) fn check(&mut self) -> Vec<(usize, u32)> {
        self.checking = self.latest;
        let lanes = self.lanes.iter().enumerate();
        lanes
            .filter(|(_, lane)| lane.at_end && lane.kind() != Kind::Done)
            .map(|(at, lane)| (at, lane.queue))
            .collect()
    }

    /// Ends a check: the ends found. True for each lane that turned out to hold more.
    pub(super) fn checked(&mut self, ends: &[(usize, u64)]) -> Vec<usize> {
        let mut behind = Vec::new();
        for &(at, end) in ends {
            let Some(lane) = self.lanes.get_mut(at) else { continue };
            if lane.at_end && lane.next < end {
                let before = lane.kind();
                lane.at_end = false;
                self.moved(at, before);
                behind.push(at);
            }
        }
        self.complete = self.complete.max(self.checking.take());
        behind
    }

    /// Each queue, with the offset of the next message that has not been given out.
    pub(super) fn progress(&self) -> impl Iterator<Item = (u32, u64)> {
        self.lanes
            .iter()
            .map(|lane| (lane.queue, lane.messages.front().map_or(lane.next, |message| message.offset)))
    }

    fn take(&mut self, at: usize) -> Next {
        let Some(lane) = self.lanes.get_mut(at) else { return Next::End };
        let Some(message) = lane.messages.pop_front() else { return Next::Page };
        self.heads.pop();
        let kind = lane.kind();
        if let Some(head) = lane.messages.front() {
            self.heads.push(Reverse((key(head), at)));
        }
        self.tell(kind, 1);
        Next::Message(Box::new(message))
    }

    /// Keeps the counts and heads true after a lane changed.
    fn moved(&mut self, at: usize, before: Kind) {
        let Some(lane) = self.lanes.get(at) else { return };
        let after = lane.kind();
        if before != Kind::Head
            && let Some(head) = lane.messages.front()
        {
            self.heads.push(Reverse((key(head), at)));
        }
        self.tell(before, -1);
        self.tell(after, 1);
    }

    fn tell(&mut self, kind: Kind, by: isize) {
        match kind {
            Kind::Unknown => self.unknown = self.unknown.saturating_add_signed(by),
            Kind::Resting => self.resting = self.resting.saturating_add_signed(by),
            Kind::Head | Kind::Done => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(queue: u32, offset: u64, position: u64) -> Message {
        Message { queue, offset, log_position: Some(position), ..Message::default() }
    }

    fn drain(merge: &mut Merge) -> (Vec<u64>, Next) {
        let mut positions = Vec::new();
        loop {
            match merge.next() {
                Next::Message(message) => positions.push(message.log_position.unwrap()),
                other => return (positions, other),
            }
        }
    }

    #[test]
    fn messages_come_in_the_order_of_the_log_whatever_the_order_of_pages() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, Some(3));
        let b = merge.add(1, 0, Some(2));
        merge.page(b, vec![message(1, 0, 20), message(1, 1, 50)], 2, true);
        assert_eq!(drain(&mut merge), (vec![], Next::Page), "the other queue may hold an earlier one");
        merge.page(a, vec![message(0, 0, 10), message(0, 1, 30)], 2, false);
        assert_eq!(drain(&mut merge), (vec![10, 20, 30], Next::Page));
        assert_eq!(merge.wants(a, 0), Some((0, 2, false)));
        assert_eq!(merge.wants(b, 0), None, "read to its end");
        merge.page(a, vec![message(0, 2, 60)], 3, true);
        assert_eq!(drain(&mut merge), (vec![50, 60], Next::End));
    }

    #[test]
    fn nothing_beyond_the_end_found_at_the_start_is_given_out() {
        let mut merge = Merge::default();
        let lane = merge.add(0, 0, Some(1));
        merge.page(lane, vec![message(0, 0, 10), message(0, 1, 20)], 2, true);
        assert_eq!(drain(&mut merge), (vec![10], Next::End));
        let mut empty = Merge::default();
        empty.add(0, 5, Some(5));
        assert_eq!(empty.next(), Next::End);
    }

    #[test]
    fn a_queue_that_lost_its_end_does_not_keep_the_reader_waiting() {
        let mut merge = Merge::default();
        let lane = merge.add(0, 0, Some(10));
        merge.page(lane, vec![message(0, 0, 10)], 1, true);
        assert_eq!(drain(&mut merge), (vec![10], Next::End));
    }

    #[test]
    fn who_follows_checks_the_other_queues_before_a_message_is_given_out() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, None);
        let b = merge.add(1, 0, None);
        merge.page(a, vec![], 0, true);
        merge.page(b, vec![], 0, true);
        assert_eq!(merge.next(), Next::Page);
        merge.page(a, vec![message(0, 0, 40), message(0, 1, 60)], 2, true);
        assert_eq!(merge.next(), Next::Check);
        assert_eq!(merge.check(), [(a, 0), (b, 1)]);
        assert_eq!(merge.checked(&[(a, 2), (b, 1)]), [b], "it holds one that we have not seen");
        assert_eq!(merge.next(), Next::Page);
        merge.page(b, vec![message(1, 0, 50)], 1, true);
        assert_eq!(drain(&mut merge), (vec![40, 50, 60], Next::Page));
    }

    #[test]
    fn a_check_proves_nothing_about_what_comes_after_it_began() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, None);
        let b = merge.add(1, 0, None);
        merge.page(b, vec![], 0, true);
        merge.page(a, vec![message(0, 0, 40)], 1, true);
        assert_eq!(merge.check(), [(a, 0), (b, 1)]);
        merge.page(a, vec![message(0, 1, 90)], 2, true);
        assert!(merge.checked(&[(a, 1), (b, 0)]).is_empty());
        assert_eq!(drain(&mut merge), (vec![40], Next::Check));
    }

    #[test]
    fn a_queue_whose_messages_ran_out_may_hold_more_before_the_next_of_another() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, None);
        let b = merge.add(1, 0, None);
        let c = merge.add(2, 0, None);
        merge.page(c, vec![], 0, true);
        merge.page(b, vec![message(1, 0, 20)], 1, true);
        merge.page(a, vec![message(0, 0, 10), message(0, 1, 40)], 2, true);
        merge.check();
        assert_eq!(merge.checked(&[(a, 2), (b, 2), (c, 0)]), [b], "a second one, at 30, came meanwhile");
        assert_eq!(drain(&mut merge), (vec![10, 20], Next::Page));
        merge.page(b, vec![message(1, 1, 30)], 2, true);
        assert_eq!(drain(&mut merge), (vec![30, 40], Next::Page));
    }

    #[test]
    fn one_queue_needs_no_check() {
        let mut merge = Merge::default();
        let lane = merge.add(3, 0, None);
        merge.page(lane, vec![message(3, 0, 1), message(3, 1, 2)], 2, true);
        assert_eq!(drain(&mut merge), (vec![1, 2], Next::Page));
        assert_eq!(merge.wants(lane, 0), Some((3, 2, true)), "now wait for more");
    }

    #[test]
    fn a_lone_message_can_be_told_from_a_burst() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, None);
        let b = merge.add(1, 0, None);
        merge.page(b, vec![], 0, true);
        merge.page(a, vec![message(0, 0, 1)], 1, true);
        assert!(merge.is_alone());
        assert!(matches!(merge.next_unchecked(), Next::Message(_)));
        merge.page(a, vec![message(0, 1, 2), message(0, 2, 3)], 3, true);
        assert!(!merge.is_alone());
    }

    #[test]
    fn progress_stops_before_what_has_not_been_given_out() {
        let mut merge = Merge::default();
        let a = merge.add(0, 0, Some(9));
        let b = merge.add(1, 4, Some(9));
        merge.page(a, vec![message(0, 2, 10), message(0, 3, 30)], 4, false);
        merge.page(b, vec![message(1, 4, 20)], 7, false);
        assert!(matches!(merge.next(), Next::Message(_)));
        assert_eq!(merge.progress().collect::<Vec<_>>(), [(0, 3), (1, 4)]);
        assert!(matches!(merge.next(), Next::Message(_)));
        assert_eq!(
            merge.progress().collect::<Vec<_>>(),
            [(0, 3), (1, 7)],
            "what a filter passed over is done"
        );
    }

    #[test]
    fn without_log_positions_store_time_decides() {
        let at = |queue, seconds| Message {
            queue,
            stored: Some(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds)),
            ..Message::default()
        };
        let mut merge = Merge::default();
        let a = merge.add(0, 0, Some(1));
        let b = merge.add(1, 0, Some(1));
        merge.page(a, vec![at(0, 9)], 1, true);
        merge.page(b, vec![at(1, 5)], 1, true);
        let Next::Message(first) = merge.next() else { panic!("there are two") };
        assert_eq!(first.queue, 1);
    }
}
