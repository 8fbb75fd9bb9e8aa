//! The time limit of calls to an etcd that answers late.

use kvpool_etcd::Client;
use std::time::Duration;

/// The limit grows to this multiple of the configured one.
const MOST: u32 = 8;

/// The time limit of the next call. It doubles while no answer comes in time. Otherwise an etcd that needs longer
/// than the limit would never answer. It falls again with the first answer within the configured limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// The configured limit.
    least: Duration,
    /// The present limit is this multiple of the configured one.
    factor: u32,
    /// The number of calls without an answer that double the limit: one for each endpoint that such calls try.
    endpoints: u32,
    /// Calls without an answer since the limit changed.
    vain: u32,
}

impl Patience {
    /// `endpoints`: the number of calls that try every endpoint once.
    pub(super) fn new(least: Duration, endpoints: usize) -> Self {
        Self {
            least,
            factor: 1,
            endpoints: u32::try_from(endpoints).unwrap_or(u32::MAX).max(1),
            vain: 0,
        }
    }

    /// The limit of the next call.
    pub(super) fn limit(&self) -> Duration {
        self.least * self.factor
    }

    /// A client with this limit.
    pub(super) fn of(&self, client: &Client) -> Client {
        client.within(self.limit())
    }

    /// Notes a call that etcd answered.
    pub(super) fn answered(&mut self, took: Duration) {
        self.vain = 0;
        if took < self.least {
            self.factor = 1;
        }
    }

    /// Notes a call without an answer. An endpoint that refused it at once is not late.
    pub(super) fn failed(&mut self, took: Duration) {
        if took < self.least {
            return;
        }
        self.vain += 1;
        if self.vain >= self.endpoints {
            self.vain = 0;
            self.factor = (self.factor * 2).min(MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_limit_doubles_when_no_endpoint_answers_and_falls_with_a_prompt_answer() {
        let mut patience = Patience::new(SECOND, 2);
        patience.failed(SECOND);
        assert_eq!(patience.limit(), SECOND, "the other endpoint may answer");
        patience.failed(SECOND);
        assert_eq!(patience.limit(), 2 * SECOND);
        patience.failed(Duration::from_millis(3));
        patience.failed(Duration::from_millis(3));
        assert_eq!(patience.limit(), 2 * SECOND, "it was refused at once");
        for _ in 0..20 {
            patience.failed(8 * SECOND);
        }
        assert_eq!(patience.limit(), 8 * SECOND);
        patience.answered(3 * SECOND);
        assert_eq!(
            patience.limit(),
            8 * SECOND,
            "the next answer may take as long"
        );
        patience.answered(SECOND / 2);
        assert_eq!(patience.limit(), SECOND);
    }
}
