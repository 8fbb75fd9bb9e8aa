//! `kvctl ssd detach`.

use crate::connection::control_error;
use crate::context::Context;
use crate::output;
use anyhow::bail;
use kvpool_client::Detached;
use kvpool_types::MediumId;
use serde::Serialize;

/// Make the pool forget a medium that will not come back
///
/// `kvctl status` lists the ids. A medium that a connected node has is refused: stop the node, or start
/// it without that --ssd. Blocks whose only copy is on the medium are lost. If a node brings the medium
/// back, the pool orders the node to format it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  kvctl ssd detach 2f1c77f0a6f94c2b8d4e5b6a7c8d9e0f
  kvctl ssd detach 2f1c77f0a6f94c2b8d4e5b6a7c8d9e0f --yes")]
pub(crate) struct Args {
    /// The medium's id, 32 hexadecimal digits
    #[arg(value_name = "MEDIUM_ID", value_parser = parse_id)]
    medium: MediumId,
    /// Also a medium that has copies of blocks
    #[arg(long)]
    yes: bool,
}

#[derive(Serialize)]
struct Outcome {
    medium: String,
    copies: u64,
}

/// Runs it.
pub(crate) async fn run(args: Args, context: &Context) -> anyhow::Result<()> {
    let client = context.connection.connect().await?;
    let medium = args.medium;
    let detached = client.detach_medium(medium, args.yes).await;
    match detached.map_err(control_error)? {
        Detached::Done(copies) => {
            let outcome = Outcome {
                medium: medium.to_string(),
                copies,
            };
            context.output.show(&outcome, |outcome| {
                let copies = output::count(outcome.copies);
                format!(
                    "medium {} is forgotten, with {copies} copies",
                    outcome.medium
                )
            })
        }
        Detached::Unknown => {
            bail!("the pool has no medium {medium}: `kvctl status` lists its media")
        }
        Detached::Connected(node) => bail!(
            "node {node} is connected and has medium {medium}: stop the node, or start it without \
             that --ssd"
        ),
        Detached::HasCopies(copies) => bail!(
            "medium {medium} has {} copies of blocks. Nothing was changed: repeat with --yes to lose \
             them",
            output::count(copies)
        ),
    }
}

fn parse_id(text: &str) -> Result<MediumId, String> {
    // A parsed number may also begin with a sign.
    let is_id = text.len() == 32 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
    let id = is_id.then(|| u128::from_str_radix(text, 16).ok());
    id.flatten()
        .map(MediumId)
        .ok_or_else(|| "a medium id has 32 hexadecimal digits".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_hexadecimal_digits_alone() {
        let id = "2f1c77f0a6f94c2b8d4e5b6a7c8d9e0f";
        let number = 0x2f1c_77f0_a6f9_4c2b_8d4e_5b6a_7c8d_9e0f;
        assert_eq!(parse_id(id), Ok(MediumId(number)));
        let signed = format!("+{}", &id[1..]);
        for wrong in [signed.as_str(), &id[1..], "", &"x".repeat(32)] {
            assert!(parse_id(wrong).is_err(), "{wrong}");
        }
    }
}
