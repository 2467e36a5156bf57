"""The words of made-up text: short and common, so that most tokenizers have one token for each of them."""

from __future__ import annotations

WORDS: tuple[str, ...] = tuple(
    """
    able about above after again air all also am and animal another answer any apple are area arm army around art ask
    away baby back bad bag ball bank base be bear beat bed been before began being below best better big bird bit
    black block blood blue board boat body bone born both box boy bring brown build burn bus business busy but buy
    by call came can car care carry cat cause center chair chance change check child choose circle city class clean
    clear close cloud coast coat cold color come cook cool copy corn cost could count country course cover create cross
    crowd cry cup cut dance dark day deal dear deep did do doctor does dog done door down draw dream
    dress drink drive drop dry during each ear early earth ease east eat edge egg eight end energy engine enough equal
    even ever every exact eye face fact fair fall family far farm fast father fear feed feel feet few field fight fill
    final find fine finger fire first fish fit five flat floor flow fly food foot for force form forward four free
    fresh friend from front full fun game garden gas gave get girl give glad glass go gold gone good got govern grass
    great green ground group grow guess guide had hair half hand happy hard has hat have he head hear heart heat
    heavy help her here high hill him his hit hold hole home hope horse hot hour house how human hundred hunt hurry ice
    idea if in inch iron island it job join joy jump just keep key kind king knew know lady lake land large last
    late laugh law lay lead learn leave left leg less let letter level lie lift light like line list listen little
    long look lost lot loud love low machine made main make man many map mark market mass master may me mean meat meet
    """.split()  # noqa: SIM905
)
