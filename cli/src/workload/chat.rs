//! A chat workload generated from a seed: many concurrent sessions that share a few system prompts.
//! With every turn a prompt grows by the last answer and the next question.

use super::{Prompt, Random, Request, Span};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// The settings of the workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chat {
    /// The seed of every choice.
    pub(crate) seed: u64,
    /// The number of requests.
    pub(crate) requests: u32,
}

/// The concurrent sessions.
const SESSIONS: u64 = 24;
const SYSTEM_PROMPTS: u64 = 4;
const SYSTEM_TOKENS: (u64, u64) = (192, 640);
const QUESTION_TOKENS: (u64, u64) = (24, 160);
const ANSWER_TOKENS: (u64, u64) = (48, 256);
const TURNS: (u64, u64) = (2, 10);
/// The pause between a session's turns, in milliseconds. Even the shortest pause lets other sessions run, so
/// the previous turn has ended.
const PAUSE: (u64, u64) = (4_000, 20_000);

impl Chat {
    /// The requests in order of arrival.
    pub(crate) fn generate(&self) -> Vec<Request> {
        let mut random = Random::new(self.seed);
        let systems: Vec<Span> = (0..SYSTEM_PROMPTS)
            .map(|_| span(&mut random, SYSTEM_TOKENS))
            .collect();
        let mut sessions: BinaryHeap<Reverse<Session>> = (0..SESSIONS)
            .map(|_| {
                let at = random.below(PAUSE.1);
                Reverse(Session::start(at, &systems, &mut random))
            })
            .collect();
        let mut requests = Vec::with_capacity(self.requests as usize);
        while requests.len() < self.requests as usize {
            let Some(Reverse(mut session)) = sessions.pop() else {
                break;
            };
            session.prompt.push(span(&mut random, QUESTION_TOKENS));
            requests.push(session.request());
            session.prompt.push(span(&mut random, ANSWER_TOKENS));
            session.turns_left -= 1;
            session.at += random.between(PAUSE.0, PAUSE.1);
            if session.turns_left == 0 {
                session = Session::start(session.at, &systems, &mut random);
            }
            sessions.push(Reverse(session));
        }
        let first = requests.first().map_or(Duration::ZERO, |first| first.at);
        for request in &mut requests {
            request.at -= first;
        }
        requests
    }
}

/// One conversation. Ordered by its next turn's time, then by its prompt, so that equal times have
/// one order.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Session {
    at: u64,
    turns_left: u64,
    prompt: Vec<Span>,
}

impl Session {
    fn start(at: u64, systems: &[Span], random: &mut Random) -> Self {
        // The lower of two draws, because some system prompts are used far more than others.
        let choice = random
            .below(SYSTEM_PROMPTS)
            .min(random.below(SYSTEM_PROMPTS));
        Self {
            at,
            turns_left: random.between(TURNS.0, TURNS.1),
            prompt: systems
                .iter()
                .copied()
                .zip(0..)
                .filter(|(_, number)| *number == choice)
                .map(|(system, _)| system)
                .collect(),
        }
    }

    fn request(&self) -> Request {
        Request {
            at: Duration::from_millis(self.at),
            tokens: self.prompt.iter().map(|span| u64::from(span.tokens)).sum(),
            prompt: Prompt::Spans(self.prompt.clone()),
        }
    }
}

fn span(random: &mut Random, (low, high): (u64, u64)) -> Span {
    Span {
        seed: random.next(),
        tokens: u32::try_from(random.between(low, high))
            .expect("invariant: the bounds fit 32 bits"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn generate(seed: u64, requests: u32) -> Vec<Request> {
        Chat { seed, requests }.generate()
    }

    fn spans(request: &Request) -> &[Span] {
        match &request.prompt {
            Prompt::Spans(spans) => spans,
            Prompt::Ids(_) => panic!("a chat's prompt is made of tokens"),
        }
    }

    #[test]
    fn a_seed_makes_one_workload() {
        assert_eq!(generate(7, 200), generate(7, 200));
        assert_ne!(generate(7, 200), generate(8, 200));
        assert_eq!(
            generate(7, 50)[..],
            generate(7, 200)[..50],
            "asking for more changes nothing that comes before"
        );
    }

    #[test]
    fn requests_arrive_in_order_and_count_their_tokens() {
        let requests = generate(1, 300);
        assert_eq!(requests.len(), 300);
        assert_eq!(requests[0].at, Duration::ZERO);
        assert!(requests.is_sorted_by_key(|request| request.at));
        for request in &requests {
            let tokens: u64 = spans(request)
                .iter()
                .map(|span| u64::from(span.tokens))
                .sum();
            assert_eq!(request.tokens, tokens);
        }
    }

    #[test]
    fn system_prompts_are_shared_and_turns_grow_the_prompt() {
        let requests = generate(1, 300);
        let mut systems: HashMap<u64, u32> = HashMap::new();
        for request in &requests {
            *systems.entry(spans(request)[0].seed).or_default() += 1;
        }
        assert_eq!(systems.len() as u64, SYSTEM_PROMPTS);
        assert!(systems.values().all(|uses| *uses > 1), "{systems:?}");

        // A later turn begins with the whole turn before: prompt, question and answer.
        let continued = requests
            .iter()
            .enumerate()
            .filter(|(at, request)| {
                let prompt = spans(request);
                prompt.len() > 2
                    && requests[..*at]
                        .iter()
                        .any(|before| *spans(before) == prompt[..prompt.len() - 2])
            })
            .count();
        let later = requests
            .iter()
            .filter(|request| spans(request).len() > 2)
            .count();
        assert_eq!(continued, later);
        assert!(later > requests.len() / 2);
    }
}
