//! The media that the master of a session refuses, and the reports of media that the node cannot use.

use super::disk::Front;
use super::{Answers, Shared};
use kvpool_types::MediumId;

impl Shared {
    /// Notes whether the master of a session refuses an offered medium, with the reason. A new answer is logged, and
    /// the next list has it.
    pub(super) fn note_answer(&self, medium: &[u8], refused: Option<String>, answers: &Answers) {
        let Some(medium) = MediumId::from_slice(medium) else {
            return;
        };
        let mut fronts = self.fronts.iter();
        let Some(front) = fronts.find(|front| front.id() == Some(medium)) else {
            return;
        };
        {
            let mut told = self.told.lock();
            let told = told.as_mut();
            let Some(told) = told.filter(|told| told.answers.same_channel(answers)) else {
                return;
            };
            let before = match &refused {
                Some(reason) => told.refused.insert(medium, reason.clone()),
                None => told.refused.remove(&medium),
            };
            if before == refused {
                return;
            }
            told.is_due = true;
        }
        let path = front.health.path().display();
        match refused {
            Some(reason) => {
                tracing::error!(%path, %medium, reason, "the master refuses the medium, which is not used");
            }
            None => tracing::info!(%path, %medium, "the master takes the medium after all"),
        }
        self.offer_again();
    }

    /// Why the master of the present session refuses a medium; `None` if it does not.
    pub(super) fn refusal_of(&self, front: &Front) -> Option<String> {
        let medium = front.id()?;
        let told = self.told.lock();
        let told = told.as_ref().filter(|told| !told.answers.is_closed());
        told?.refused.get(&medium).cloned()
    }

    /// Sends another list to a session, because a medium of the last one cannot be used.
    pub(super) fn list_again(&self, answers: &Answers) {
        if let Some(told) = self.told.lock().as_mut()
            && told.answers.same_channel(answers)
        {
            told.is_due = true;
        }
        self.offer_again();
    }
}
