//! Time as the machines see it.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point in time: the time since an origin that the caller chooses once for each process. Two
/// processes never compare their moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub Duration);

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// The time since `earlier`; zero when `earlier` is the later moment.
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}
