//! The certain facts about a key, and the answers that contradict them.

use super::intervals::{Certain, End, Ends, NEVER, Span, meet};
use super::{At, Excuse, Found, Kind, Operation, Removed, Rules, Violation, What, Wrote};
use std::collections::{BTreeMap, HashMap};

/// Every answer of a history that has no explanation.
pub fn check(history: &[Operation], rules: &Rules) -> Vec<Violation> {
    let mut keys: BTreeMap<u64, Vec<Operation>> = BTreeMap::new();
    for operation in history {
        keys.entry(operation.key).or_default().push(*operation);
    }
    let of_key = |operations: &Vec<Operation>| Key::new(operations, rules).judge(operations);
    keys.values().flat_map(of_key).collect()
}

/// The put or upsert that wrote a value.
#[derive(Clone, Copy, Debug)]
struct Writing {
    start: At,
    /// The time by which it had certainly taken effect; [`NEVER`] if it may never have.
    by: At,
    /// The latest time at which it took effect, if it did.
    latest: At,
}

/// The writings that may have happened, by value.
type Written = HashMap<u64, Writing>;

/// The certain facts about one key.
struct Key<'a> {
    rules: &'a Rules,
    written: Written,
    /// The values whose put certainly failed.
    failed: Vec<u64>,
    ends: Ends,
    present: Certain,
    absent: Certain,
}

impl<'a> Key<'a> {
    fn new(operations: &[Operation], rules: &'a Rules) -> Self {
        let (written, failed) = written(operations, rules.repeats);
        let mut sightings = Vec::new();
        let mut absences = vec![(At::ZERO, At::ZERO)];
        let mut ends = Vec::new();
        let mut removals: Vec<Span> = Vec::new();
        for (value, writing) in &written {
            if writing.by < NEVER {
                let span = (writing.start, writing.by);
                sightings.push(span);
                ends.push(End {
                    span,
                    value: Some(*value),
                });
            }
        }
        for operation in operations {
            let read = rules.seen(operation);
            match operation.what {
                What::Put(_, Wrote::Present) => sightings.push((operation.start, operation.end)),
                What::Get(Found::Value(value)) => {
                    sightings.push(read);
                    ends.push(End {
                        span: read,
                        value: Some(value),
                    });
                }
                What::Exist(true) => sightings.push(read),
                What::Get(Found::Nothing) | What::Exist(false) if !rules.hid(read) => {
                    absences.push(read);
                    ends.push(End {
                        span: read,
                        value: None,
                    });
                }
                What::Remove(Removed::Done | Removed::Missing) => {
                    let span = (operation.start, operation.end);
                    removals.push(span);
                    // The remove may have left a value that it could not see.
                    if !rules.hid(span) {
                        absences.push(span);
                        ends.push(End { span, value: None });
                    }
                }
                What::Remove(Removed::Refused) => removals.push((operation.start, operation.end)),
                What::Remove(Removed::Unknown) => removals.push((operation.start, NEVER)),
                _ => {}
            }
        }
        for excuse in &rules.excuses {
            if let Excuse::Lost(from, to) = *excuse {
                removals.push((from, to));
            }
        }
        Self {
            rules,
            ends: Ends::new(ends),
            present: Certain::new(&sightings, removals),
            absent: Certain::new(
                &absences,
                written.values().map(|w| (w.start, w.latest)).collect(),
            ),
            written,
            failed,
        }
    }

    fn judge(&self, operations: &[Operation]) -> Vec<Violation> {
        let judged = operations.iter().filter_map(|operation| {
            let (kind, why) = self.fault(operation)?;
            Some(Violation {
                kind,
                operation: *operation,
                why,
            })
        });
        judged.collect()
    }

    fn fault(&self, operation: &Operation) -> Option<(Kind, String)> {
        let read = self.rules.seen(operation);
        match operation.what {
            What::Get(Found::Torn) => {
                Some((Kind::Torn, "the bytes are no value of the key".into()))
            }
            What::Get(Found::Value(value)) => self.fault_of_hit(value, read),
            What::Get(Found::Nothing) | What::Exist(false) => self.fault_of_miss(read),
            What::Exist(true) => self.fault_of_presence(read),
            // The put found the key absent before it made it present.
            What::Put(value, Wrote::Stored) => {
                let by = self.written.get(&value).map_or(operation.end, |w| w.by);
                self.fault_of_miss((operation.start, by))
            }
            _ => None,
        }
    }

    fn fault_of_hit(&self, value: u64, read: Span) -> Option<(Kind, String)> {
        let Some(written) = self.written.get(&value) else {
            let why = match self.failed.contains(&value) {
                true => format!("the put of value {value} failed"),
                false => format!("nobody put value {value}"),
            };
            return Some((Kind::NeverWritten, why));
        };
        if read.1 < written.start {
            let why = format!("value {value} was put from {:?} on", written.start);
            return Some((Kind::NeverWritten, why));
        }
        let end = self.ends.of(value, written.by)?;
        if read.0 <= end.span.1 {
            return None;
        }
        let by = end.span.1;
        Some(match end.value {
            Some(other) => {
                let why = format!("value {value} had given way to {other} by {by:?}");
                (Kind::Stale, why)
            }
            None => {
                let why = format!("value {value} was gone by {by:?}");
                (Kind::Resurrected, why)
            }
        })
    }

    fn fault_of_miss(&self, seen: Span) -> Option<(Kind, String)> {
        let lost = self.present.throughout(seen) && !self.rules.hid(seen);
        lost.then(|| {
            let why = format!("a value was there from {:?} to {:?}", seen.0, seen.1);
            (Kind::Lost, why)
        })
    }

    fn fault_of_presence(&self, seen: Span) -> Option<(Kind, String)> {
        let phantom = self.absent.throughout(seen);
        phantom.then(|| {
            let why = format!("nothing was there from {:?} to {:?}", seen.0, seen.1);
            (Kind::Phantom, why)
        })
    }
}

/// The values that were or may have been written, and the values that certainly were not.
fn written(operations: &[Operation], repeats: bool) -> (Written, Vec<u64>) {
    let (mut written, mut failed) = (Written::new(), Vec::new());
    for operation in operations {
        let (What::Put(value, wrote) | What::Upsert(value, wrote)) = operation.what else {
            continue;
        };
        let (by, latest) = match wrote {
            Wrote::Stored => (operation.end, operation.end),
            Wrote::Present => (NEVER, operation.end),
            Wrote::Unknown => (NEVER, NEVER),
            Wrote::Not => {
                failed.push(value);
                continue;
            }
        };
        let start = operation.start;
        written.insert(value, Writing { start, by, latest });
    }
    // A client that read the value saw that it had been written.
    for operation in operations {
        if let What::Get(Found::Value(value)) = operation.what
            && let Some(writing) = written.get_mut(&value)
        {
            let seen = match repeats {
                // The value may be written once more, until its client has an answer.
                true => writing.latest,
                false => operation.end.max(writing.start),
            };
            writing.by = writing.by.min(seen);
            writing.latest = writing.latest.min(seen);
        }
    }
    (written, failed)
}

impl Rules {
    /// The span whose state a read may show. A miss is never cached.
    fn seen(&self, operation: &Operation) -> Span {
        let asked = (operation.start, operation.end);
        let is_hit = matches!(operation.what, What::Get(Found::Value(_)));
        let by_deposed = |excuse: &Excuse| matches!(*excuse, Excuse::Deposed(from, to) if meet((from, to), asked));
        match (is_hit && operation.remembers) || self.excuses.iter().any(by_deposed) {
            true => (operation.start.saturating_sub(self.stale), operation.end),
            false => asked,
        }
    }

    /// Whether blocks may have been unreachable at some point of a span.
    fn hid(&self, span: Span) -> bool {
        let covers =
            |excuse: &Excuse| matches!(*excuse, Excuse::Hidden(from, to) if meet((from, to), span));
        self.excuses.iter().any(covers)
    }
}
