//! `kvctl top`.

mod facts;
mod screen;
mod view;

use crate::connection::connect_error;
use crate::context::Context;
use crate::output::{self, Format};
use facts::Facts;
use kvpool_client::cluster_overview;
use screen::Screen;
use serde_json::Value;
use std::io::IsTerminal;
use std::time::Duration;

/// Show the pool live: alerts, rates, nodes, namespaces, masters
///
/// It shows the facts of the page that kvmaster serves at its HTTP port. Any master answers: a standby too,
/// and also while the pool has no leader. `q` or Ctrl-C ends it.
///
/// If standard output is not a terminal, the snapshots follow each other as texts. With --output json each
/// snapshot is one line; with --once too, it is indented JSON.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl top
  kvctl --master http://10.0.0.1:7070 top --every 5s
  kvctl top --once
  kvctl top --once --output json | jq '.alerts[].message'")]
pub(crate) struct Args {
    /// Show one snapshot and end
    #[arg(long)]
    once: bool,
    /// Time between two snapshots
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "1s")]
    every: Duration,
}

/// Timeout for one master: a silent master must not delay the others for long.
const TIMEOUT: Duration = Duration::from_secs(2);
/// A shorter interval shows nothing new: the master samples once a second.
const SHORTEST: Duration = Duration::from_millis(200);

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let mut snapshot = ask(context).await?;
    if args.once {
        let facts = facts(&snapshot)?;
        let all = |_: &Value| view::text(&facts, usize::MAX);
        return context.output.show(&snapshot, all);
    }
    let every = args.every.max(SHORTEST);
    if context.output == Format::Json || !std::io::stdout().is_terminal() {
        while print(context.output, &snapshot)? {
            tokio::time::sleep(every).await;
            snapshot = ask(context).await?;
        }
        return Ok(());
    }
    // An interrupt drops this future, and the screen with it.
    let mut screen = Screen::open()?;
    let mut answer = Ok(snapshot);
    loop {
        screen.show(&match &answer {
            Ok(snapshot) => view::text(&facts(snapshot)?, screen.height()),
            Err(error) => view::without_answer(error),
        })?;
        let next = async {
            tokio::time::sleep(every).await;
            ask(context).await
        };
        answer = tokio::select! {
            next = next => next,
            () = screen.quit() => return Ok(()),
        };
    }
}

async fn ask(context: &Context) -> anyhow::Result<Value> {
    let connection = &context.connection;
    let timeout = TIMEOUT.min(connection.timeout);
    let (tls, credentials) = (connection.tls(), connection.credentials()?);
    let (told_by, json) = cluster_overview(&connection.masters(), &tls, timeout, &credentials)
        .await
        .map_err(connect_error)?;
    let mut snapshot: Value = serde_json::from_slice(&json)?;
    snapshot["told_by"] = told_by.into();
    Ok(snapshot)
}

fn facts(snapshot: &Value) -> anyhow::Result<Facts> {
    Ok(serde::Deserialize::deserialize(snapshot)?)
}

/// Prints one of several snapshots. False if the reader has closed the output.
fn print(format: Format, snapshot: &Value) -> anyhow::Result<bool> {
    match format {
        Format::Json => output::write_json_line(snapshot),
        Format::Table => {
            let text = view::text(&facts(snapshot)?, usize::MAX);
            output::write_text(&text)
        }
    }
}
