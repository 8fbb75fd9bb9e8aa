//! A pool does not stay without a leader while a master could lead: one that runs, and whom the store answers.

use crate::life::Life;
use crate::world::World;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// So long nobody leads at most. A master may step down first, load what is stored, and campaign again.
const LONGEST: Duration = Duration::from_secs(6);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Leaderless {
    /// Since when no master holds the leader's key.
    since: Option<Instant>,
    /// Since when each master could lead, and in which life.
    able: BTreeMap<usize, (Life, Instant)>,
}

impl Leaderless {
    /// Looks at the store and the masters that run.
    fn look(&mut self, is_led: bool, able: Vec<(usize, Life)>) -> Result<(), String> {
        let now = Instant::now();
        let before = std::mem::take(&mut self.able);
        for (number, life) in able {
            let known = before
                .get(&number)
                .filter(|(known, _)| known.is_same(&life));
            let since = known.map_or(now, |(_, since)| *since);
            self.able.insert(number, (life, since));
        }
        if is_led {
            self.since = None;
            return Ok(());
        }
        let free = *self.since.get_or_insert(now);
        let mut able = self.able.iter();
        let idle = able.find(|(_, (_, since))| free.max(*since) + LONGEST < now);
        match idle {
            Some((number, _)) => Err(format!(
                "nobody has led for {} ms, and m{number} could lead",
                (now - free).as_millis()
            )),
            None => Ok(()),
        }
    }
}

/// Somebody leads soon. A master without standbys begins its terms by itself.
pub(crate) fn ends(world: &World) -> Result<(), String> {
    if world.plan.electing == 0 {
        return Ok(());
    }
    let mut able = world.standing();
    able.retain(|(number, _)| world.disk.answers(*number));
    let is_led = world.disk.is_led();
    world.leaderless.lock().look(is_led, able)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn a_master_that_could_lead_all_the_while_is_noticed() {
        let (life, mut leaderless) = (Life::default(), Leaderless::default());
        let able = || vec![(1, life.clone())];
        assert_eq!(leaderless.look(true, able()), Ok(()));
        advance(LONGEST).await;
        assert_eq!(leaderless.look(false, able()), Ok(()));
        advance(LONGEST).await;
        // The store does not answer it for a moment.
        assert_eq!(leaderless.look(false, Vec::new()), Ok(()));
        assert_eq!(leaderless.look(false, able()), Ok(()));
        advance(LONGEST + Duration::from_millis(1)).await;
        let wrong = leaderless.look(false, able()).unwrap_err();
        assert!(wrong.contains("m1 could lead"), "{wrong}");
        assert_eq!(leaderless.look(true, able()), Ok(()));
        assert_eq!(leaderless.look(false, able()), Ok(()));
    }
}
