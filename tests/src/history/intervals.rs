//! Spans of time, and the certain facts in them.

use super::At;

/// From the first point to the second, both included.
pub(super) type Span = (At, At);

/// The end of a span without a known end.
pub(super) const NEVER: At = At::MAX;

/// Whether two spans have a point in common.
pub(super) fn meet(one: Span, other: Span) -> bool {
    one.0 <= other.1 && other.0 <= one.1
}

/// The spans in which a fact certainly held.
///
/// They follow from sightings and endings. A sighting says that the fact held at some point of a
/// span. An ending says that the fact may have stopped at some point of a span, and at no point
/// outside the endings. Between a sighting and the next ending the fact certainly held. If an
/// ending may lie between the sighting's point and its end, nothing follows from the sighting.
#[derive(Debug)]
pub(super) struct Certain {
    /// Disjoint spans, in order.
    spans: Vec<Span>,
}

impl Certain {
    pub(super) fn new(sightings: &[Span], mut endings: Vec<Span>) -> Self {
        endings.sort_unstable();
        // The latest possible point of any ending up to this one, in the order of their starts.
        let latest: Vec<At> = endings
            .iter()
            .scan(At::ZERO, |latest, ending| {
                *latest = ending.1.max(*latest);
                Some(*latest)
            })
            .collect();
        let mut spans: Vec<Span> = Vec::new();
        for &(from, to) in sightings {
            let begun = endings.partition_point(|ending| ending.0 <= to);
            let in_between = begun > 0 && latest[begun - 1] >= from;
            let next = endings.get(begun).map_or(NEVER, |ending| ending.0);
            if to < next && !in_between {
                spans.push((to, next));
            }
        }
        spans.sort_unstable();
        let mut merged: Vec<Span> = Vec::new();
        for span in spans {
            match merged.last_mut() {
                Some(last) if span.0 <= last.1 => last.1 = last.1.max(span.1),
                _ => merged.push(span),
            }
        }
        Self { spans: merged }
    }

    /// Whether the fact held at every point of a span, and a little before and after.
    pub(super) fn throughout(&self, span: Span) -> bool {
        let begun = self.spans.partition_point(|certain| certain.0 < span.0);
        begun > 0 && self.spans[begun - 1].1 > span.1
    }
}

/// The certain ends of a key's values: the time from which each may have happened, the time by
/// which it had, and the next value.
#[derive(Debug)]
pub(super) struct Ends {
    /// The ends in the order of their first points.
    ends: Vec<End>,
    /// For each of `ends`: of it and all later ends, the two that were over first, with two
    /// different values.
    first: Vec<(Option<End>, Option<End>)>,
}

/// One certain end of any value that was present before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) span: Span,
    /// The value that replaced it; `None` without a value.
    pub(super) value: Option<u64>,
}

impl Ends {
    pub(super) fn new(mut ends: Vec<End>) -> Self {
        ends.sort_unstable_by_key(|end| end.span);
        let mut first = vec![(None, None); ends.len()];
        let (mut best, mut second): (Option<End>, Option<End>) = (None, None);
        for (slot, &end) in first.iter_mut().zip(&ends).rev() {
            let sooner = |than: Option<End>| than.is_none_or(|than| end.span.1 < than.span.1);
            if best.is_some_and(|best| best.value == end.value) {
                if sooner(best) {
                    best = Some(end);
                }
            } else if sooner(best) {
                second = best;
                best = Some(end);
            } else if sooner(second) {
                second = Some(end);
            }
            *slot = (best, second);
        }
        Self { ends, first }
    }

    /// The first certain end of `value`, which was present by `since`.
    pub(super) fn of(&self, value: u64, since: At) -> Option<End> {
        let after = self.ends.partition_point(|end| end.span.0 <= since);
        let (best, second) = *self.first.get(after)?;
        best.filter(|best| best.value != Some(value)).or(second)
    }
}
