//! `kvctl exist`.

use crate::connection::{control_error, parse_key};
use crate::context::Context;
use crate::exit;
use crate::output;
use kvpool_client::Leasing;
use kvpool_types::Key;
use serde::Serialize;

/// Show which keys are in the pool
///
/// Takes no leases and changes no block's recency. Exits with code 3 if a key is not in the pool.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl exist greeting && echo there
  kvctl exist a b c --output json")]
pub(crate) struct Args {
    /// The keys
    #[arg(required = true, value_parser = parse_key)]
    keys: Vec<Key>,
}

#[derive(Serialize)]
struct Answer {
    key: String,
    present: bool,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let existence = client
        .exist(&args.keys, Leasing::None)
        .await
        .map_err(control_error)?;
    let answers: Vec<Answer> = args
        .keys
        .iter()
        .zip(existence.present)
        .map(|(key, present)| Answer {
            key: key.to_string(),
            present,
        })
        .collect();
    context.output.show(&answers, |answers| {
        let mut table = output::table(["key", "present"]);
        for answer in answers {
            table.add_row([
                answer.key.as_str(),
                if answer.present { "yes" } else { "no" },
            ]);
        }
        table.to_string()
    })?;
    let missing: Vec<&str> = answers
        .iter()
        .filter(|answer| !answer.present)
        .map(|answer| answer.key.as_str())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(exit::Missing(missing.join(", ")).into())
}
