//! A put that failed has changed nothing. What leaves the pool while a put of its key runs may have been replaced by
//! that put. So it is judged once every change that may have taken it has ended.

use crate::history::History;
use tokio::time::Instant;

/// Something that has left the pool while a change of its key ran.
#[derive(Debug)]
struct Doubt {
    /// The number of its key.
    key: u64,
    /// When it was there last.
    since: Instant,
    /// When it was seen to have left.
    until: Instant,
    what: String,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Vec<Doubt>);

impl Doubts {
    /// Something of a key was there at `since`, and is not there now. An error if no change of the key may have taken
    /// it.
    pub(crate) fn left(
        &mut self,
        history: &History,
        key: u64,
        since: Instant,
        what: String,
    ) -> Result<(), String> {
        if !history.may_have_changed(key, since) {
            return Err(what);
        }
        self.0.push(Doubt {
            key,
            since,
            until: Instant::now(),
            what,
        });
        Ok(())
    }

    /// An error if something has left that no change took, as is known by now.
    pub(crate) fn judge(&mut self, history: &History) -> Result<(), String> {
        let mut wrong = None;
        self.0.retain_mut(|doubt| {
            match history.may_have_taken(doubt.key, doubt.since, doubt.until) {
                None => true,
                Some(may) => {
                    if !may && wrong.is_none() {
                        wrong = Some(std::mem::take(&mut doubt.what));
                    }
                    false
                }
            }
        });
        match wrong {
            Some(what) => Err(format!(
                "{what}: each put of the key that ran then has failed"
            )),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::Outcome;
    use std::time::Duration;
    use tokio::time::advance;

    const KEY: u64 = 3;

    /// A block leaves while a put of its key runs, which ends like this.
    async fn judged(outcome: Outcome) -> Result<(), String> {
        let mut history = History::new(Duration::ZERO, Duration::ZERO);
        let mut doubts = Doubts::default();
        let number = history.begin(KEY, Some(100), true);
        advance(Duration::from_millis(5)).await;
        let since = Instant::now();
        advance(Duration::from_millis(40)).await;
        doubts.left(&history, KEY, since, "gone".to_owned())?;
        doubts.judge(&history)?;
        let outcome = match outcome {
            Outcome::Done(_) => Outcome::Done(Instant::now()),
            other => other,
        };
        history.end(KEY, number, outcome);
        advance(Duration::from_millis(5)).await;
        // What begins later has taken nothing.
        history.begin(KEY, Some(100), true);
        doubts.judge(&history)?;
        doubts.judge(&history)
    }

    #[tokio::test(start_paused = true)]
    async fn a_put_that_failed_has_taken_nothing() {
        let wrong = judged(Outcome::Failed).await.unwrap_err();
        assert!(wrong.starts_with("gone"), "{wrong}");
        for outcome in [Outcome::Unknown, Outcome::Done(Instant::now())] {
            assert_eq!(judged(outcome).await, Ok(()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_leaves_without_a_change_is_wrong_at_once() {
        let (history, mut doubts) = (History::default(), Doubts::default());
        let wrong = doubts.left(&history, KEY, Instant::now(), "gone".to_owned());
        assert_eq!(wrong, Err("gone".to_owned()));
    }
}
