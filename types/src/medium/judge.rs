//! The rule by which the master accepts or drops the content of a medium.

/// The number of attachments of a medium. The master counts them, and the superblock of the medium has the
/// count too.
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

/// The master's verdict on a medium that a node offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// The medium is in the state that the master knows. Its copies stay.
    Accept,
    /// The medium is unknown, rolled back, or a clone that was used elsewhere. The master drops its copies.
    /// The node formats the medium, which gives it a new id.
    New,
}

/// Judges a medium by the generation in its superblock. `offered` is `None` for a blank medium. `attached` is
/// the generation of the last attach whose end the master logged. `pending` is the next generation, if the
/// master logged the begin of its attach.
///
/// An attach that began may or may not have reached the superblock. Nothing is stored on the medium between
/// these two points, so both generations have the same content.
///
/// An image of the same generation may lack stores, and is accepted. The header and checksums prove each
/// extent, so a lost store is a miss.
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
