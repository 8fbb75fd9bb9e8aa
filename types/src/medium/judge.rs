//! The rule by which the master believes a medium's content, or drops it.

/// How often a medium has been attached. The master counts, and the superblock repeats the count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl Generation {
    /// The generation of the next attach.
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl std::fmt::Display for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The master's judgement of an offered medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// The medium is in the state that the master knows: its replicas stay.
    Accept,
    /// The medium is unknown, rolled back, or a copy that was used elsewhere. The master drops its
    /// replicas, and the node formats it, which gives it a new medium id.
    New,
}

/// Judges a medium by the generation in its superblock. `offered` is `None` for a blank medium.
/// `attached` is the last generation whose attach the master logged as done. `pending` is the one
/// after it, where the master logged that its attach began.
///
/// An attach that began may or may not have reached the superblock. Nothing is stored between the
/// two, so both generations have the same content.
///
/// An image of the *same* generation that lost stores is accepted. Each of its extents is judged by
/// its header and checksums, so a lost store is a miss.
pub fn judge(
    offered: Option<Generation>,
    attached: Generation,
    pending: Option<Generation>,
) -> Judgement {
    let began = pending.filter(|p| *p == attached.next() && *p != attached);
    match offered {
        Some(generation) if generation == attached || Some(generation) == began => {
            Judgement::Accept
        }
        _ => Judgement::New,
    }
}

#[cfg(test)]
mod tests;
